"""Mixture of experts."""

from __future__ import annotations

from lynnc.kernels.kernel import Kernel

KERNELS: tuple[Kernel, ...] = ()
