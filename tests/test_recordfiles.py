"""Where records lie: the user's folder, the files that ship, export and import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import (
    DEFAULT,
    H100,
    H200,
    HERE,
    LINEAR,
    PROBLEM,
    SHIPPED,
    SPARK,
    at,
    made,
    records_of_tiny,
    served,
    users,
)

from lynnc.choose import choose_all
from lynnc.compiler import Request, fused_graph, lower_programs
from lynnc.deviceidentity import device_of_identity, identity_of
from lynnc.errors import OptionError, OutputError
from lynnc.kernels.table import KERNELS
from lynnc.modelfile import load_model
from lynnc.plan import Options
from lynnc.record import RecordOrigin, merge_records, parse_records, records_text
from lynnc.recordfiles import (
    Imported,
    RecordChoice,
    check_records_folder,
    check_records_readable,
    default_records_folder,
    export_records,
    import_records,
    is_current,
    is_legal,
    load_records,
    write_user_record,
)
from lynnc.records import Records
from lynnc.render import template_digest


def test_default_folder() -> None:
    assert default_records_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/lynnc/records")
    assert default_records_folder({"HOME": "/h"}) == Path("/h/.cache/lynnc/records")


def test_a_written_record_is_found_again_and_replaced(tmp_path: Path) -> None:
    first = write_user_record(tmp_path / "new", made(seconds=1e-6))
    assert first.parent == tmp_path / "new" / "h200" and users(tmp_path / "new") == [made(seconds=1e-6)]
    assert write_user_record(tmp_path / "new", made(seconds=2e-6)) == first
    assert users(tmp_path / "new") == [made(seconds=2e-6)]
    others = [at(5), made(identity_of(H100)), made(template="0" * 64), made(origin=RecordOrigin.SIMULATED)]
    assert len({first, *(write_user_record(tmp_path / "new", other) for other in others)}) == 5
    write_user_record(tmp_path / "new", made(identity_of(SPARK)))
    assert len(users(tmp_path / "new")) == 5 and len(users(tmp_path / "new", identity_of(SPARK))) == 1
    assert load_records(None, tmp_path / "new") == Records()


def test_which_records_count(tmp_path: Path) -> None:
    write_user_record(tmp_path, made())
    counts = {
        choice: Counter(known.is_user for known in load_records(HERE, tmp_path, choice).known)
        for choice in RecordChoice
    }
    shipped = len(parse_records((SHIPPED / "h200.json").read_bytes()))
    assert counts[RecordChoice.ALL] == {True: 1, False: shipped}
    assert counts[RecordChoice.USER] == {True: 1} and counts[RecordChoice.SHIPPED] == {False: shipped}
    assert not counts[RecordChoice.NONE]
    assert {known.file for known in load_records(HERE, tmp_path).known} == {
        str(tmp_path / "h200"),
        "autotune/records/h200.json",
    }


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[Callable[[Path], object]] = [
    become_folder,
    Path.unlink,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes()[:-20]),
    lambda path: path.write_text(path.read_text().replace('"schema": 2', '"schema": 1')),
    lambda path: path.write_text(path.read_text().replace('"sm_count": 132', '"sm_count": 131')),
    lambda path: path.write_text(path.read_text().replace('"h200"', '"h100"')),
    lambda path: path.write_text(path.read_text().replace('"n": 8192', '"n": 8193')),
    lambda path: path.rename(path.with_name("linear-other.json")),
    lambda path: path.write_bytes(b"\xff" * 100),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_entry_is_a_miss_and_is_replaced(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    kept = at(9000)
    path = write_user_record(tmp_path, made())
    write_user_record(tmp_path, kept)
    damage(path)
    assert users(tmp_path) == [kept]
    write_user_record(tmp_path, made())
    assert Counter(record.question for record in users(tmp_path)) == Counter([made().question, kept.question])


def test_a_folder_that_cannot_be_read_holds_nothing_and_one_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "h200").write_text("")
    (tmp_path / "records" / "x.json").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "none", tmp_path / "records"):
        assert users(folder) == []
        if folder.name != "none":
            with pytest.raises(OutputError, match=r"cannot be written .*--records-folder"):
                write_user_record(folder, made())
            with pytest.raises(OutputError, match=r"No record can be written .*--records-folder"):
                check_records_folder(folder, HERE)
    check_records_folder(tmp_path / "none", HERE)
    assert users(tmp_path / "none") == [] and not any((tmp_path / "none" / "h200").iterdir())


def refuse_to_list(self: Path) -> Iterator[Path]:
    raise PermissionError(13, "Permission denied", str(self))


def test_a_folder_that_nobody_may_read_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_name = tmp_path / ("x" * 300)
    assert users(long_name) == []
    with pytest.raises(OptionError, match=r"cannot be read \(File name too long\).*--records-folder"):
        check_records_readable(long_name)
    write_user_record(tmp_path, made())
    check_records_readable(tmp_path)
    check_records_readable(tmp_path / "none")
    monkeypatch.setattr(Path, "iterdir", refuse_to_list)
    assert users(tmp_path) == []
    for refused in (check_records_readable, lambda folder: export_records(tmp_path / "out.json", HERE, folder)):
        with pytest.raises(OptionError, match=r"cannot be read \(Permission denied\).*--records-folder"):
            refused(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("closed", ["", "h200"])
def test_permissions_that_are_missing_are_a_miss(tmp_path: Path, closed: str) -> None:
    write_user_record(tmp_path, made())
    (tmp_path / closed).chmod(0)
    try:
        assert users(tmp_path) == []
    finally:
        (tmp_path / closed).chmod(0o755)


WAITER = """
import sys
from pathlib import Path
from lynnc.deviceidentity import identity_of
from lynnc.recordfiles import load_records
from lynnc.target import find_device
print(sum(known.is_user for known in load_records(identity_of(find_device("h200")), Path(sys.argv[1])).known))
"""


def test_a_pipe_among_the_records_is_not_waited_for(tmp_path: Path) -> None:
    path = write_user_record(tmp_path, made())
    write_user_record(tmp_path, at(100))
    path.unlink()
    os.mkfifo(path)
    os.mkfifo(path.with_name("a.json"))
    os.mkfifo(tmp_path / "b.json")
    (path.parent / "c.json").symlink_to("c.json")
    command = [sys.executable, "-W", "error", "-c", WAITER, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "1\n"
    write_user_record(tmp_path, made())
    assert len(users(tmp_path)) == 2, "the record takes the pipe's place"


def test_a_file_system_that_refuses_to_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "replace", refuse)
    for seconds in (2e-6, 1e-6):
        path = write_user_record(tmp_path, made(seconds=seconds))
    assert users(tmp_path) == [made(seconds=1e-6)] and list(path.parent.iterdir()) == [path]


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from lynnc.record import parse_records
from lynnc.recordfiles import load_records, write_user_record
folder, first = Path(sys.argv[1]), int(sys.argv[2])
(record,) = parse_records(sys.stdin.read())
for n in range(30):
    write_user_record(folder, replace(record, problem={**record.problem, "n": first + 2 * n}))
    write_user_record(folder, replace(record, seconds=1.0 + first))
    assert any(k.record.question == record.question for k in load_records(record.device, folder).known)
"""


def test_two_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    def start(first: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", WRITER, str(tmp_path), str(first)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    processes = [start(1), start(2)]
    for process in processes:
        assert process.stdin
        process.stdin.write(records_text([made(seconds=1.0)]))
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0, 0]
    assert {record.problem["n"] for record in users(tmp_path)} == {8192, *range(1, 61)}
    assert len(list((tmp_path / "h200").iterdir())) == 61


# Shipped files


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_records_are_current_legal_and_in_order(path: Path, request: pytest.FixtureRequest) -> None:
    """With ``--update-golden``, records of an earlier text of their template are carried over: read the diff, and
    measure where the change may matter."""
    templates = {kernel.name: template_digest(kernel.template) for kernel in KERNELS}
    records = parse_records(path.read_bytes())
    if request.config.getoption("--update-golden"):
        records = tuple(
            record
            if is_current(record)
            else replace(record, template=templates[record.kernel], origin=RecordOrigin.CARRIED_OVER)
            for record in records
        )
        path.write_text(records_text(records))
    assert records and path.read_text() == records_text(records), "sorted, one record a line, no rivals, none damaged"
    device = device_of_identity(records[0].device)
    assert device and path.name == f"{device.name}.json"
    kernels = {kernel.name: kernel for kernel in KERNELS}
    for record in records:
        assert is_current(record), f"{record.kernel}'s template changed: tune again, or see this test's docstring"
        assert kernels[record.kernel].refusal(record.problem, record.knobs, device.target) is None, record
        assert record.origin is not RecordOrigin.SIMULATED, "what ships was measured"


def test_a_shipped_file_that_is_damaged_or_of_another_device_is_a_miss(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "records").mkdir()
    monkeypatch.setattr("lynnc.recordfiles.files", lambda package: tmp_path)
    for name, text in (
        ("h200", records_text([made()])),
        ("h100", records_text([at(5)])),
        ("b200", "{"),
        ("README", ""),
    ):
        (tmp_path / "records" / f"{name}.json").write_text(text)
    assert [known.record for known in load_records(HERE).known] == [made()]


def test_every_decode_launch_of_the_35b_model_has_a_record_on_an_h200() -> None:
    graph = fused_graph(load_model("qwen3.6-35b-a3b"), "decode/1")
    origins = {
        op.name: choice.origin
        for op, choice in zip(graph.ops, choose_all(graph, H200.target, load_records(HERE)), strict=True)
    }
    assert {name for name, origin in origins.items() if origin != "record h200"} <= {
        "argmax_partial",
        "argmax_final",
        "argmax",
    }
    on_h100 = choose_all(graph, H100.target, load_records(identity_of(H100)))
    assert (
        Counter(choice.origin for choice in on_h100)["nearest record h200"] == Counter(origins.values())["record h200"]
    )


def test_a_target_alone_and_a_library_call_know_nothing_of_the_users_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, options = load_model("tiny-full"), Options(programs=("decode/1",))

    def origins(request: Request) -> set[str]:
        return {call.entry.origin for _, low in lower_programs(spec, request).values() for call in low.kernels.values()}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for record in records_of_tiny():
        write_user_record(default_records_folder({"XDG_CACHE_HOME": str(tmp_path)}), record)
    assert origins(Request(H200.target, options=options)) == {"default"} == origins(Request(H200.target, H200, options))
    with_mine = Request(H200.target, H200, options, records=load_records(HERE, tmp_path / "lynnc" / "records"))
    assert origins(with_mine) == {"default", "user record h200"}


# Export and import


def test_export_is_the_form_that_ships_and_merges_with_it(tmp_path: Path) -> None:
    shipped = parse_records((SHIPPED / "h200.json").read_bytes())
    better = replace(shipped[0], seconds=1e-6, origin=RecordOrigin.MEASURED, triton="3.6.0", date="2026-11-30")
    guess = at(6, origin=RecordOrigin.SIMULATED)
    for record in (better, made(), at(5, template="0" * 64), made(identity_of(H100)), guess):
        write_user_record(tmp_path / "mine", record)
    out = tmp_path / "h200.json"
    assert export_records(out, HERE, tmp_path / "mine") == len(shipped) + 1
    found = parse_records(out.read_bytes())
    assert out.read_text() == records_text(found) == records_text([better, made(), *shipped[1:]])
    with pytest.raises(OutputError, match="exists already"):
        export_records(out, HERE, tmp_path / "mine")
    assert export_records(out, HERE, tmp_path / "mine", force=True) == len(shipped) + 1
    with pytest.raises(OptionError, match="no records of spark"):
        export_records(tmp_path / "spark.json", identity_of(SPARK), tmp_path / "mine")


def test_import_takes_what_is_better(tmp_path: Path) -> None:
    mine, file = tmp_path / "mine", tmp_path / "theirs.json"
    write_user_record(mine, made(seconds=2e-6))
    write_user_record(mine, at(9000, seconds=2e-6))
    theirs = [made(seconds=1e-6), at(9000, seconds=3e-6), at(100), made(template="0" * 64)]
    file.write_text(records_text(theirs))
    assert import_records(file, mine) == Imported(taken=2, kept=1, outdated=1)
    assert {(record.problem["n"], record.seconds) for record in users(mine)} == {
        (8192, 1e-6),
        (9000, 2e-6),
        (100, None),
    }
    assert import_records(file, mine) == Imported(taken=0, kept=3, outdated=1)
    assert import_records(SHIPPED / "h200.json", mine).taken == 0, "they count already"


DAMAGED_KNOBS = [
    {"X": 1},
    {},
    {**DEFAULT, "BLOCK_N": 7},
    {**DEFAULT, "X": 1},
    {**DEFAULT, "BLOCK_N": 64, "num_warps": 1, "BLOCK_K": 8192},
]


@pytest.mark.parametrize("knobs", DAMAGED_KNOBS, ids=str)
def test_knobs_that_are_not_the_kernels_are_neither_imported_nor_exported(tmp_path: Path, knobs: dict) -> None:
    mine, file = tmp_path / "mine", tmp_path / "theirs.json"
    assert LINEAR.refusal(PROBLEM, knobs, H200.target)
    kept, bad = made(seconds=2e-6), replace(made(seconds=1e-12), knobs=knobs)
    write_user_record(mine, kept)
    file.write_text(records_text([bad, at(100)]))
    found = import_records(file, mine)
    assert found == Imported(taken=1, kept=0, outdated=0, illegal=1)
    assert found.text.count(".") == 1 and "1 records taken" in found.text and "left out: 1 whose knobs" in found.text
    assert kept in users(mine) and len(users(mine)) == 2 and served(*load_records(HERE, mine).known)

    write_user_record(mine, bad)
    export_records(tmp_path / "out.json", HERE, mine)
    exported = parse_records((tmp_path / "out.json").read_bytes())
    assert at(100) in exported and bad not in exported
    file.write_text(records_text([kept]))
    assert import_records(file, mine).taken == 1, "what is not legal has no rival to beat"
    assert kept in users(mine) and bad not in users(mine)


def test_import_of_shipped_records_with_other_knobs_takes_none(tmp_path: Path) -> None:
    shipped = parse_records((SHIPPED / "h200.json").read_bytes())
    file = tmp_path / "bad.json"
    file.write_text(records_text([replace(record, knobs={"X": 1}, seconds=1e-12) for record in shipped]))
    found = import_records(file, tmp_path / "mine")
    assert found == Imported(taken=0, kept=0, outdated=0, illegal=len(shipped)) and not users(tmp_path / "mine")
    assert f"0 records taken, 0 no better than known ones; left out: {len(shipped)} whose knobs" in found.text
    assert export_records(tmp_path / "out.json", HERE, tmp_path / "mine") == len(shipped)
    assert parse_records((tmp_path / "out.json").read_bytes()) == shipped


def test_an_import_counts_what_is_damaged(tmp_path: Path) -> None:
    file, text = tmp_path / "theirs.json", records_text([made(seconds=3e-6), at(100), made(template="0" * 64)])
    for figure in ("NaN", "-1.0", "0.0", "1e999", "1" * 400):
        file.write_text(text.replace("3e-06", figure))
        found = import_records(file, tmp_path / figure[:5])
        assert found == Imported(taken=1, kept=0, outdated=1, damaged=1)
        assert found.text.endswith("; left out: 1 of other templates, 1 damaged.")
    file.write_text(records_text([made(seconds=3e-6)]).replace("3e-06", "NaN"))
    assert import_records(file, tmp_path / "none") == Imported(taken=0, kept=0, outdated=0, damaged=1)


@pytest.mark.parametrize("value", ["word", -1, 0, 10**400, None], ids=["word", "-1", "0", "long", "none"])
def test_a_record_of_a_problem_that_no_launch_has_stops_nothing(tmp_path: Path, value: object) -> None:
    """Constraints read the problem's fields; what a file says of them is anybody's."""
    shipped = parse_records((SHIPPED / "h200.json").read_bytes())
    odd = [
        replace(record, problem={name: old for name, old in record.problem.items() if name != field} | change)
        for record in {record.kernel: record for record in shipped}.values()
        for field in record.problem
        for change in [{} if value is None else {field: value}]
    ]
    file = tmp_path / "odd.json"
    file.write_text(records_text(odd))
    found = import_records(file, tmp_path / "mine")
    assert found.taken + found.kept + found.illegal + found.outdated == len(merge_records(odd))
    assert export_records(tmp_path / "out.json", HERE, tmp_path / "mine") >= len(shipped)
    graph = fused_graph(load_model("tiny-full"), "decode/1")
    assert choose_all(graph, H200.target, load_records(HERE, tmp_path / "mine", RecordChoice.USER))


def test_a_record_of_an_unknown_architecture_is_not_legal() -> None:
    assert is_legal(made()) and not is_legal(made(replace(HERE, arch="sm_999"))) and not is_legal(made(kernel="none"))


def test_import_of_no_records_says_so(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        import_records(tmp_path / "none.json", tmp_path)
    (tmp_path / "old.json").write_text('{"schema": 1, "records": []}')
    with pytest.raises(OptionError, match="holds no records of this schema"):
        import_records(tmp_path / "old.json", tmp_path)
