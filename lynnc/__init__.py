"""lynnc: a kernel compiler for pruned mixture-of-experts language models."""

from lynnc.version import VERSION as __version__

__all__ = ["__version__"]
