"""Kernel templates, read by ``lynnc.render``."""
