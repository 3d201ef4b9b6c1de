"""Where tensors are computed: the check of a device's name before any work."""

from __future__ import annotations

import torch

from lynnc.errors import OptionError


def check_device(name: str) -> torch.device:
    """The device of that name (``cpu``, ``cuda``, ``cuda:1``); OptionError if torch has none such."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"--device {name}: there is no such device; write cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"--device {name}: only the CPU and CUDA GPUs are used; write cpu, cuda or cuda:N.")
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= found:
            raise OptionError(f"--device {name}: torch {torch.__version__} finds {found} GPUs; use --device cpu.")
    return device
