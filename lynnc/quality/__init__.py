"""How good a model is, measured on an engine: wherever its logits are computed."""
