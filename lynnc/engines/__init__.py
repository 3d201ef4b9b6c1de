"""Whatever computes a model's logits: the interpreter on any machine, a compiled plan on a GPU."""
