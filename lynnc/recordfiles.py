"""Where records lie: ``autotune/records/<device>.json``, which ships, and the user's own, one file for each.

In: a device and the user's folder of records. Out: ``Records``; damaged, foreign and unreadable files are left out and
nothing fails. A user's record is a file ``DEVICE/KERNEL-KEY.json`` of the same form as a shipped one, with one record.
Two writers therefore never touch the same file unless they answer the same question, and then the later whole answer
stands: no lock is needed, which network file systems may not have and a killed process would leave behind.

Example::

    folder = default_records_folder(os.environ)          # the command line only
    records = load_records(identity_of(find_device("h200")), folder)
    write_user_record(folder, record)
    export_records(Path("h200.json"), record.device, folder)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

from lynnc.artifact import digest
from lynnc.deviceidentity import Identity
from lynnc.errors import OptionError, OutputError, TargetError
from lynnc.kernels.kernel import Kernel
from lynnc.kernels.table import KERNELS
from lynnc.outputfile import place_file, write_file
from lynnc.record import Parsed, Record, merge_records, parse_file, parse_records, records_text
from lynnc.records import Known, Records
from lynnc.render import template_digest
from lynnc.store import cache_folder
from lynnc.target import find_target
from lynnc.tools import find_tools


class RecordChoice(StrEnum):
    """Which records count."""

    ALL = "all"
    SHIPPED = "shipped"
    USER = "user"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the records of a file: how many were taken, how many were no better than known ones, how many
    were outdated, how many have knobs that are not legal, and how many entries are no records."""

    taken: int
    kept: int
    outdated: int
    illegal: int = 0
    damaged: int = 0

    @property
    def text(self) -> str:
        """All of it as one sentence."""
        reasons = {
            "of other templates": self.outdated,
            "whose knobs their kernel does not have or refuses for their problem and device": self.illegal,
            "damaged": self.damaged,
        }
        left_out = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
        return (
            f"{self.taken} records taken, {self.kept} no better than known ones"
            f"{f'; left out: {left_out}' if left_out else ''}."
        )


def default_records_folder(environment: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/lynnc/records``, or ``~/.cache/lynnc/records``."""
    return cache_folder(environment) / "records"


def load_records(
    device: Identity | None, folder: Path | None = None, choice: RecordChoice = RecordChoice.ALL
) -> Records:
    """All records of the device's architecture; ``folder`` holds the user's. None of any for no device."""
    if device is None:
        return Records()
    known: list[Known] = []
    if folder and choice in (RecordChoice.ALL, RecordChoice.USER):
        known += _user_records(folder)
    if choice in (RecordChoice.ALL, RecordChoice.SHIPPED):
        known += _shipped_records()
    ours = tuple(item for item in known if item.record.device.arch == device.arch)
    return Records(device, ours, find_tools().triton_version or "")


def check_records_readable(folder: Path) -> None:
    """OptionError if the folder cannot be read; one that is missing has no records yet."""
    try:
        next(folder.iterdir(), None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OptionError(
            f"The records in {folder} cannot be read ({error.strerror or error}): give a readable folder with "
            "--records-folder."
        ) from error


def check_records_folder(folder: Path, device: Identity) -> None:
    """OutputError if records of a device could not be written there: to be known before they are measured."""
    place = folder / device.name
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise _unwritable(f"No record can be written to {place}", error) from error


def write_user_record(folder: Path, record: Record) -> Path:
    """Puts one record in the user's folder, in the place of an earlier answer to its question; OutputError if it cannot
    be written."""
    path = _path_of(folder, record)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        place_file(path, records_text([record]).encode())
    except OSError as error:
        raise _unwritable(f"The record {path} cannot be written", error) from error
    return path


def _unwritable(what: str, error: OSError) -> OutputError:
    return OutputError(f"{what} ({error.strerror or error}): give a writable folder with --records-folder.")


def export_records(path: Path, device: Identity, folder: Path, force: bool = False) -> int:
    """Writes the best known records of one device as a file that can ship, and says how many they are.

    The user's and the shipped ones are merged; outdated, illegal and simulated ones are left out. OptionError if none
    is left, or if the folder cannot be read.
    """
    check_records_readable(folder)
    records = [record for record in _usable(_records_of(device, folder)) if not record.is_simulated]
    if not records:
        raise OptionError(f"There are no records of {device.name} in {folder}: run `lynnc tune` on that device first.")
    write_file(path, records_text(records), force, "--export")
    return len(merge_records(records))


def import_records(path: Path, folder: Path) -> Imported:
    """Takes the records of a file into the user's folder that are better than those known; OptionError for a file that
    holds none."""
    try:
        parsed = parse_file(path.read_bytes())
    except OSError as error:
        raise OptionError(
            f"{path} cannot be read ({error.strerror or error}): give --import a file of records."
        ) from error
    if parsed == Parsed():
        raise OptionError(f"{path} holds no records of this schema: give --import a file that --export wrote.")
    current = [record for record in parsed.records if is_current(record)]
    usable = [record for record in current if is_legal(record)]
    taken = _better(usable, folder)
    for record in taken:
        write_user_record(folder, record)
    return Imported(
        taken=len(taken),
        kept=len(usable) - len(taken),
        outdated=len(parsed.records) - len(current),
        illegal=len(current) - len(usable),
        damaged=parsed.damaged,
    )


def _better(records: Sequence[Record], folder: Path) -> list[Record]:
    """Those of one device's records that beat each other and all that are known."""
    if not records:
        return []
    known = merge_records(_usable(_records_of(records[0].device, folder)))
    rivals = {rival.question: rival for rival in known}
    return [new for new in merge_records(records) if new.question not in rivals or new.beats(rivals[new.question])]


def is_current(record: Record) -> bool:
    """Whether the kernel is still there and its template has the text that the record is valid for."""
    kernel = _kernel_of(record)
    return kernel is not None and record.template == template_digest(kernel.template)


def is_legal(record: Record) -> bool:
    """Whether the kernel has these knobs, and none of its constraints refuses them for the record's problem and
    device."""
    kernel = _kernel_of(record)
    try:
        target = find_target(record.device.arch)
        return kernel is not None and kernel.refusal(record.problem, record.knobs, target) is None
    except (TargetError, LookupError, TypeError, ValueError, ArithmeticError):
        return False  # an unknown architecture, or a problem that lacks what the constraints read


def _kernel_of(record: Record) -> Kernel | None:
    return next((kernel for kernel in KERNELS if kernel.name == record.kernel), None)


def _usable(records: Iterable[Record]) -> Iterator[Record]:
    return (record for record in records if is_current(record) and is_legal(record))


def _records_of(device: Identity, folder: Path) -> list[Record]:
    return [known.record for known in load_records(device, folder).known if known.record.device == device]


def _shipped_records() -> Iterator[Known]:
    shipped = files("lynnc.autotune").joinpath("records")
    for entry in sorted(shipped.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            for record in parse_records(entry.read_bytes()):
                if entry.name == f"{record.device.name}.json":
                    yield Known(record, False, f"autotune/records/{entry.name}")


def _user_records(folder: Path) -> Iterator[Known]:
    for place in _entries(folder):
        for path in _entries(place):
            for record in parse_records(_content(path)):
                if path == _path_of(folder, record):
                    yield Known(record, True, str(place))


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, sorted; nothing where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _content(path: Path) -> bytes:
    """The bytes of a regular file, and none of anything else: reading a pipe would wait for a writer for ever."""
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError:
        return b""


def _path_of(folder: Path, record: Record) -> Path:
    """Simulated records lie beside measured ones and never replace them."""
    kind = "-simulated" if record.is_simulated else ""
    return folder / record.device.name / f"{record.kernel}-{digest(record.question.encode())[:32]}{kind}.json"
