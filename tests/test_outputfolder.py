"""Output folders: which paths are refused before any work, and that replacing one loses nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from lynnc.errors import OutputError
from lynnc.outputfolder import check_folder, settled, swap_folder

MARKER = "marker.json"


def make_folder(path: Path, content: str = "") -> Path:
    """A folder of the kind that may be replaced."""
    path.mkdir(parents=True)
    (path / MARKER).write_text(content)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@dataclass(frozen=True)
class Detour:
    """A path as typed in ``here/p``, and what it means in ``here``."""

    typed: str
    meant: str


DETOURS = (
    Detour(".", "p"),
    Detour("..", "."),
    Detour("../p", "p"),
    Detour("../p/../p", "p"),
    Detour("sub/..", "p"),
    Detour("missing/..", "p"),
    Detour("../link/new", "p/new"),
    Detour("../link", "link"),
)


@pytest.mark.parametrize("detour", DETOURS, ids=lambda detour: detour.typed)
def test_a_path_is_settled(tmp_path, monkeypatch, detour):
    make_folder(tmp_path / "p" / "sub")
    (tmp_path / "link").symlink_to(tmp_path / "p")
    monkeypatch.chdir(tmp_path / "p")
    assert settled(Path(detour.typed)) == tmp_path / detour.meant
    assert settled(Path("/")) == Path("/")


@dataclass(frozen=True)
class Input:
    """Where what is read lies, and whether the output ``p`` may be replaced then."""

    path: str
    is_refused: bool


INPUTS = (
    Input("p", True),
    Input("p/checkpoint", True),
    Input("p/../p/checkpoint", True),
    Input("link", True),
    Input("link/checkpoint", True),
    Input(".", False),
    Input("p2", False),
)


@pytest.mark.parametrize("read", INPUTS, ids=lambda read: read.path)
def test_what_is_read_is_never_replaced(tmp_path, read):
    folder = make_folder(tmp_path / "p")
    make_folder(tmp_path / "p" / "checkpoint")
    make_folder(tmp_path / "p2")
    (tmp_path / "link").symlink_to(tmp_path / "p")
    if not read.is_refused:
        check_folder(folder, MARKER, "test", True, (tmp_path / read.path,))
        return
    with pytest.raises(OutputError, match="which is read, and will not be replaced"):
        check_folder(folder, MARKER, "test", True, (tmp_path / read.path,))


@pytest.mark.parametrize("target", ["p", "missing"])
def test_a_link_is_not_replaced(tmp_path, target):
    make_folder(tmp_path / "p")
    (tmp_path / "link").symlink_to(target)
    for force in (False, True):
        with pytest.raises(OutputError, match="is a symbolic link and will not be replaced"):
            check_folder(tmp_path / "link", MARKER, "test", force)


@pytest.mark.parametrize("name", ["x" * 241, "x" * 300, "é" * 121, f"{'x' * 300}/p", "y/" * 3000 + "p"])
def test_names_that_no_file_system_takes(tmp_path, name):
    with pytest.raises(OutputError, match=r"cannot be written \(.*\): choose another --output\.$"):
        check_folder(tmp_path / name, MARKER, "test")
    check_folder(tmp_path / ("x" * 240), MARKER, "test")


def test_a_folder_without_permission(tmp_path, monkeypatch):
    """Root may look anywhere, so the system's refusal is put in its place."""

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(OutputError, match=r"cannot be written \(Permission denied\)"):
        check_folder(tmp_path / "private" / "p", MARKER, "test")


def test_the_current_folder_is_gone(tmp_path, monkeypatch):
    gone = make_folder(tmp_path / "gone")
    monkeypatch.chdir(gone)
    (gone / MARKER).unlink()
    gone.rmdir()
    with pytest.raises(OutputError, match="cannot be written"):
        settled(Path("p"))


def test_swapping_leaves_nothing_else_and_takes_nothing_else(tmp_path):
    folder, fresh = make_folder(tmp_path / "p", "before"), make_folder(tmp_path / "fresh", "after")
    make_folder(tmp_path / ".p.old", "precious")
    swap_folder(fresh, folder)
    assert (folder / MARKER).read_text() == "after"
    assert (tmp_path / ".p.old" / MARKER).read_text() == "precious"
    assert names(tmp_path) == [".p.old", "p"]


def test_a_swap_that_fails_puts_the_former_folder_back(tmp_path):
    folder = make_folder(tmp_path / "p", "before")
    with pytest.raises(OSError, match="No such file"):
        swap_folder(tmp_path / "missing", folder)
    assert (folder / MARKER).read_text() == "before"
    assert names(tmp_path) == ["p"]


def test_an_interrupt_between_the_renames_puts_the_former_folder_back(tmp_path, monkeypatch):
    folder, fresh = make_folder(tmp_path / "p", "before"), make_folder(tmp_path / "fresh", "after")
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path == fresh:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swap_folder(fresh, folder)
    assert (folder / MARKER).read_text() == "before"
    assert names(tmp_path) == ["fresh", "p"]
