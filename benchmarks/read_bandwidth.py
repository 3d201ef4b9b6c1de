"""How fast this GPU reads its memory: the bandwidth that ceilings are computed from (``lynnc/target.py``).

In: nothing. Out: bytes a second of a kernel that reads 4 GiB once and keeps one sum a program, for several shapes of
it; the fastest is the record.

Example::

    python benchmarks/read_bandwidth.py --output bandwidth.json
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
import triton
import triton.language as tl
from gputiming import time_on_gpu

from lynnc.bench.records import setting_on, write_records
from lynnc.bench.timing import Timing
from lynnc.runtime.cudadevice import open_device

BYTES = 4 << 30
REPEATS = 15
COMMAND = "python benchmarks/read_bandwidth.py"
SHAPES = tuple((block, warps, programs) for block in (2048, 4096, 8192) for warps in (4, 8) for programs in (1, 4, 16))
"""64-bit words of a tile, warps, and programs for each multiprocessor times 132."""


@triton.jit  # type: ignore[untyped-decorator]
def _read(words, sums, tiles, programs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.int64)
    for tile in range(tl.program_id(0), tiles, programs):
        total += tl.load(words + tile * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


def time_shape(words: torch.Tensor, block: int, warps: int, programs: int) -> Timing:
    """Seconds to read all words once; the sum is compared with torch's."""
    sums = torch.zeros(programs, dtype=torch.int64, device="cuda")
    tiles = len(words) // block
    timing = time_on_gpu(
        lambda: _read[(programs,)](words, sums, tiles, programs, BLOCK=block, num_warps=warps), REPEATS
    )
    assert int(sums.sum()) == int(words.sum()), "the kernel did not read everything"
    return timing


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="File for the record.")
@click.option("--force", is_flag=True, help="Replace it.")
def main(output: Path | None, force: bool) -> None:
    """Measure the read bandwidth of this GPU."""
    words = torch.randint(-(2**62), 2**62, (BYTES // 8,), device="cuda")
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    found = {shape: time_shape(words, shape[0], shape[1], shape[2] * cores) for shape in SHAPES}
    block, warps, programs = shape = min(found, key=lambda item: found[item].median)
    click.echo(
        f"{BYTES / found[shape].median / 1e12:.3f} TB/s with {block} words, {warps} warps, {programs} programs a "
        "multiprocessor"
    )
    if output:
        where: dict[str, str | int | float | bool] = {
            "bytes": BYTES,
            "words": block,
            "warps": warps,
            "programs": programs,
        }
        setting = setting_on(open_device().facts, {"torch": torch.__version__, "triton": triton.__version__}, COMMAND)
        record = setting.rate("read_bytes_per_s", found[shape], BYTES, "B/s", **where)
        write_records(output, [record], force)


if __name__ == "__main__":
    main()
