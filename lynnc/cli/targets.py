"""``lynnc targets``: architectures and devices that code can be compiled for."""

from __future__ import annotations

from dataclasses import asdict

import click

from lynnc.cli.output import number, print_json, print_table, size, text
from lynnc.target import DEVICES, TARGETS, Device, Target

GIB = 1024**3
ABILITIES = {
    "has_pdl": "PDL",
    "has_tma": "TMA",
    "has_wgmma": "WGMMA",
    "has_tcgen05": "tcgen05",
    "has_fp8_type": "FP8",
    "has_fp4_mma": "FP4 MMA",
}


@click.command("targets", epilog="Example: lynnc targets --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def command(as_json: bool) -> None:
    """List GPU architectures (--target) and devices (--device)."""
    if as_json:
        targets = [asdict(target) for target in TARGETS.values()]
        devices = [{**asdict(device), "target": device.target.name} for device in DEVICES.values()]
        print_json({"targets": targets, "devices": devices})
        return
    columns = [text("target"), text("code"), number("shared memory a block"), number("threads a multiprocessor")]
    columns += [text("abilities"), text("devices")]
    print_table("Architectures", columns, [_target_cells(target) for target in TARGETS.values()])
    columns = [text("device"), text("target"), number("multiprocessors"), number("bandwidth"), number("BF16 FLOP/s")]
    columns += [number("L2"), number("memory"), text("figures from")]
    print_table("Devices", columns, [_device_cells(device) for device in DEVICES.values()])


def _target_cells(target: Target) -> list[str]:
    return [
        target.name,
        target.arch,
        f"{target.shared_memory_limit:,} B",
        str(target.threads_per_sm),
        ", ".join(name for field, name in ABILITIES.items() if getattr(target, field)),
        ", ".join(device.name for device in DEVICES.values() if device.target == target),
    ]


def _device_cells(device: Device) -> list[str]:
    return [
        device.name,
        device.target.name,
        str(device.sm_count),
        f"{size(device.bandwidth_bytes_per_s)}/s",
        f"{device.flops_per_s / 1e12:,.0f} T",
        f"{device.l2_bytes / 1024**2:.0f} MiB",
        f"{device.memory_bytes / GIB:.0f} GiB",
        device.source,
    ]
