"""lynnc: a kernel compiler for pruned mixture-of-experts language models."""

__version__ = "0.1.0"
