"""What a GPU is called, and records as text: the same on every machine, and nothing damaged gets in."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynnc.deviceidentity import (
    LONGEST_NAME,
    Identity,
    device_of_identity,
    identify,
    identity_of,
    named_device,
    safe_name,
)
from lynnc.record import Parsed, Record, RecordOrigin, merge_records, parse_file, parse_records, records_text
from lynnc.target import DEVICES, TARGETS, find_device

MIB = 1 << 20
H200 = identity_of(find_device("h200"))

# What drivers say: name, capability, multiprocessors, bytes of L2; and the name that it must become.
DRIVER_NAMES = [
    ("NVIDIA H200", 90, 132, 60 * MIB, "h200"),
    ("NVIDIA H200", 90, 132, 50 * MIB, "h200"),
    ("NVIDIA H200 NVL", 90, 132, 60 * MIB, "h200"),
    ("NVIDIA H200 NVL", 90, 120, 60 * MIB, "h200-nvl"),
    ("NVIDIA H200 MIG 1g.18gb", 90, 16, 8 * MIB, "h200-mig-1g-18gb"),
    ("NVIDIA H200", 90, 16, 8 * MIB, "h200-16sm"),
    ("NVIDIA H200", 90, 132, 30 * MIB, "h200-132sm"),
    ("NVIDIA GH200 480GB", 90, 132, 60 * MIB, "gh200-480gb"),
    ("NVIDIA H100 80GB HBM3", 90, 132, 50 * MIB, "h100"),
    ("NVIDIA H100 PCIe", 90, 114, 50 * MIB, "h100-pcie"),
    ("NVIDIA A100-SXM4-80GB", 80, 108, 40 * MIB, "a100"),
    ("NVIDIA GeForce RTX 5090", 120, 170, 96 * MIB, "rtx5090"),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", 120, 82, 64 * MIB, "rtx-5090-laptop-gpu"),
    ("NVIDIA GeForce RTX 5090", 120, 168, 96 * MIB, "rtx-5090-168sm"),
    ("NVIDIA GeForce RTX 4090 D", 89, 114, 72 * MIB, "rtx-4090-d"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 188, 128 * MIB, "r6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, 188, 128 * MIB, "r6000"),
    ("NVIDIA GB10", 121, 48, 24 * MIB, "spark"),
    ("NVIDIA L40S/NVIDIA", 89, 142, 96 * MIB, "l40s"),
    ("Some/../../etc GPU", 90, 7, MIB, "some-etc-gpu"),
    ("..", 90, 7, MIB, "gpu"),
    ("", 90, 7, MIB, "gpu"),
]


@pytest.mark.parametrize(("name", "capability", "sm_count", "l2_bytes", "expected"), DRIVER_NAMES)
def test_names_of_drivers(name: str, capability: int, sm_count: int, l2_bytes: int, expected: str) -> None:
    identity = identify(name, capability, sm_count, l2_bytes)
    assert identity.name == expected
    device = device_of_identity(identity)
    assert (device is not None) == (expected in DEVICES) and (device is None or identity == identity_of(device))
    assert identity.sm_count == sm_count and identity.arch == TARGETS[f"sm_{capability}"].arch


def test_a_name_of_the_table_on_another_architecture_is_another_gpu() -> None:
    assert named_device("NVIDIA GB10") == find_device("spark")
    assert device_of_identity(identify("NVIDIA GB10", 90, 48, 24 * MIB)) is None


@given(st.text(max_size=200), st.sampled_from(sorted(TARGETS)), st.integers(1, 300), st.integers(0, 1 << 40))
def test_every_name_is_a_safe_file_name(name: str, target: str, sm_count: int, l2_bytes: int) -> None:
    identity = identify(name, TARGETS[target].capability, sm_count, l2_bytes)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", identity.name)
    assert PurePosixPath("records", identity.name).name == identity.name and len(identity.name) <= LONGEST_NAME + 6
    assert safe_name(identity.name) == identity.name
    assert (identity.name in DEVICES) == (device_of_identity(identity) is not None)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_every_device_of_the_table_is_found_by_its_own_name(device) -> None:
    assert device_of_identity(identity_of(device)) == device
    assert identify(f"NVIDIA {device.name}", device.target.capability, device.sm_count, device.l2_bytes) == identity_of(
        device
    )


WORDS = st.text("abcdefghijklmnop_0123456789", min_size=1, max_size=12)
FIGURES = st.none() | st.floats(1e-9, 1e3)
RECORDS = st.builds(
    Record,
    kernel=WORDS,
    problem=st.dictionaries(WORDS, st.integers(0, 1 << 40) | st.text(max_size=8), max_size=4),
    knobs=st.dictionaries(WORDS, st.integers(0, 1 << 20), max_size=4),
    device=st.just(H200),
    template=st.text("0123456789abcdef", min_size=64, max_size=64),
    origin=st.sampled_from(RecordOrigin),
    triton=st.none() | WORDS,
    ptxas=st.none() | WORDS,
    seconds=FIGURES,
    spread=FIGURES,
    gain=st.none() | st.floats(-1, 1),
    date=st.none() | st.dates().map(str),
)


@given(st.lists(RECORDS, min_size=1, max_size=5), st.randoms())
def test_text_round_trip_sorted_one_record_a_line(records: list[Record], random) -> None:
    text = records_text(records)
    found = parse_records(text)
    assert found == merge_records(records) and records_text(found) == text
    assert len(text.splitlines()) == len(found) + 6 and json.loads(text)["schema"] == 2
    distinct = [record for record in records if sum(other.question == record.question for other in records) == 1]
    random.shuffle(distinct)
    assert merge_records(distinct) == merge_records(reversed(distinct))
    for line in text.splitlines()[4:-2]:
        keys = list(json.loads(line.rstrip(",")))
        assert keys == sorted(keys)


def example(**values: object) -> Record:
    fixed = {"kernel": "linear", "problem": {"k": 2048, "formats": "bf16"}, "knobs": {"num_warps": 4}}
    return Record(**{**fixed, "device": H200, "template": "ab" * 32, **values})  # type: ignore[arg-type]


def test_of_rivals_the_faster_measured_one_stays() -> None:
    slow, fast = example(seconds=2e-6, gain=0.1), example(seconds=1e-6, knobs={"num_warps": 8})
    guess, old = example(seconds=1e-9, origin=RecordOrigin.SIMULATED), example(origin=RecordOrigin.CARRIED_OVER)
    for rivals in ([slow, fast, guess, old], [old, guess, fast, slow]):
        assert merge_records(rivals) == (fast,)
    assert merge_records([guess, old]) == (old,)
    other = example(template="cd" * 32, seconds=9.0)
    assert set(map(id, merge_records([slow, other]))) == {id(slow), id(other)}


def test_one_file_is_of_one_device() -> None:
    with pytest.raises(AssertionError, match="of one device"):
        records_text([example(), example(device=replace(H200, sm_count=1))])


BAD_LINES = [
    {"kernel": 1},
    {"problem": None},
    {"problem": {"k": 1.5}},
    {"problem": {"k": True}},
    {"knobs": {"num_warps": "4"}},
    {"knobs": {"num_warps": True}},
    {"knobs": []},
    {"origin": "guessed"},
    {"seconds": 0.0},
    {"seconds": -1.0},
    {"seconds": float("nan")},
    {"seconds": 10**400},
    {"spread": -1e-9},
    {"spread": float("inf")},
    {"gain": float("inf")},
    {"gain": 1.5},
    {"seconds": "1"},
    {"date": "yesterday"},
    {"extra": 1},
]


@pytest.mark.parametrize("change", BAD_LINES, ids=str)
def test_a_damaged_record_is_left_out_and_the_others_stay(change: dict[str, object]) -> None:
    good, bad = example(), example(kernel="embed")
    data = json.loads(records_text([good, bad]))
    data["records"] = [{**line, **change} if line["kernel"] == "embed" else line for line in data["records"]]
    assert parse_records(json.dumps(data)) == (good,)
    assert parse_file(json.dumps(data)) == Parsed((good,), damaged=1)
    data["records"] = [line for line in data["records"] if line["kernel"] == "linear"] + [None, 1, [], {}]
    assert parse_file(json.dumps(data)) == Parsed((good,), damaged=4)


WHOLE = records_text([example()])
BAD_TEXTS = [
    "",
    "{",
    "[]",
    "null",
    "1",
    '"schema"',
    "[" * 100_000,
    b"\xff\xfe\x00",
    b"\x80",
    WHOLE[:-10],
    WHOLE.replace('"schema": 2', '"schema": 1'),
    WHOLE.replace('"schema": 2', '"schema": null'),
    WHOLE.replace('"sm_count": 132', '"sm_count": "132"'),
    WHOLE.replace('"h200"', '"../h200"'),
    WHOLE.replace('"h200"', '"NVIDIA H200"'),
    WHOLE.replace('"arch": "sm_90a", ', ""),
    '{"schema": 2, "device": {}, "records": []}',
    WHOLE.replace('"records": [', '"entries": ['),
]


@pytest.mark.parametrize("text", BAD_TEXTS, ids=lambda text: repr(text[:30]))
def test_a_damaged_file_holds_nothing(text: str | bytes) -> None:
    assert parse_records(text) == ()


@given(st.binary(max_size=200), st.integers(0, len(WHOLE)))
def test_no_text_is_an_error(noise: bytes, cut: int) -> None:
    parse_records(noise)
    for record in parse_records(WHOLE[:cut].encode() + noise):
        assert isinstance(record.device, Identity)
