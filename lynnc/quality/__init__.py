"""How good a model is, measured on an engine, and whether a change of it may ship."""
