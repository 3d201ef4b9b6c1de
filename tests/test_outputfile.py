"""Single output files: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lynnc.errors import OutputError
from lynnc.outputfile import check_file, place_file, write_file


def test_a_file_is_written_whole_and_nothing_else(tmp_path: Path) -> None:
    write_file(tmp_path / "a.json", "{}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o644
    with pytest.raises(OutputError, match=r"a.json exists already: choose another --to or pass --force"):
        write_file(tmp_path / "a.json", "new", option="--to")
    write_file(tmp_path / "a.json", "new", force=True)
    assert (tmp_path / "a.json").read_text() == "new"


@pytest.mark.parametrize("check", [check_file, lambda path: write_file(path, "{}")])
def test_a_name_that_is_too_long_is_said_before_the_work(check, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"n cannot be written \(File name too long\): choose another --output"):
        check(tmp_path / ("n" * 300))
    with pytest.raises(OutputError, match="File name too long"):
        check(tmp_path / ("n" * 300) / "a.json")


@pytest.mark.parametrize("name", ["n" * 255, "\N{SNOWMAN}" * 85])
def test_what_passes_the_check_can_be_written(name: str, tmp_path: Path) -> None:
    check_file(tmp_path / name)
    write_file(tmp_path / name, "{}")
    place_file(tmp_path / name, b"new")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_link_to_nothing_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to(tmp_path / "gone")
    with pytest.raises(OutputError, match="exists already"):
        check_file(tmp_path / "a.json")


def test_a_file_that_cannot_be_renamed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OutputError, match=r"a.json cannot be written \(No space left on device\)"):
        write_file(tmp_path / "a.json", "{}")
    assert list(tmp_path.iterdir()) == []
