"""How fast this GPU multiplies BF16 matrices: the FLOP/s that ceilings are computed from (``lynnc/target.py``).

In: nothing. Out: FLOP/s of torch's product of two square matrices of normally distributed values, for several sizes;
the fastest is the record. Values matter: a chip that multiplies zeros draws less power and keeps a higher clock.

Example::

    python benchmarks/tensor_rate.py --output tensor-rate.json
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from gputiming import time_on_gpu

from lynnc.bench.records import setting_on, write_records
from lynnc.bench.timing import Timing
from lynnc.runtime.cudadevice import open_device

SIZES = (4096, 8192, 12288, 16384)
REPEATS = 15
COMMAND = "python benchmarks/tensor_rate.py"


def time_size(size: int) -> Timing:
    """Seconds of one product [size, size] x [size, size]."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(left)
    return time_on_gpu(lambda: torch.matmul(left, right, out=out), REPEATS)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="File for the record.")
@click.option("--force", is_flag=True, help="Replace it.")
def main(output: Path | None, force: bool) -> None:
    """Measure the BF16 rate of this GPU's tensor cores."""
    found = {size: time_size(size) for size in SIZES}
    size = min(found, key=lambda size: found[size].median / size**3)
    click.echo(f"{2 * size**3 / found[size].median / 1e12:.0f} TFLOP/s with matrices of {size} x {size}")
    if output:
        setting = setting_on(open_device().facts, {"torch": torch.__version__}, COMMAND)
        record = setting.rate("bf16_flops_per_s", found[size], 2 * size**3, "FLOP/s", size=size)
        write_records(output, [record], force)


if __name__ == "__main__":
    main()
