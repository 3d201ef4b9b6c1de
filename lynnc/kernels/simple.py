"""Ops of a few lines."""

from __future__ import annotations

from lynnc.kernels.kernel import Kernel

KERNELS: tuple[Kernel, ...] = ()
