"""The quality gate: whether a change of a model's plan or weights may ship."""
