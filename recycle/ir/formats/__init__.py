"""File formats of schedules: one module each with `loads` and `dumps`, registered here by its command-line name.

A file's format is known by its suffix, and where several formats share one, or none has it, by the content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recycle.errors import ScheduleError
from recycle.files import read_whole, write_whole
from recycle.ir.formats import native, torch_csv
from recycle.ir.schedule import Schedule


@dataclass(frozen=True)
class Format:
    """One file format.

    Attributes:
        suffixes: of its files, with the dot; the first format with a suffix is what is written by default.
        loads: (content, name that begins error messages) -> schedule. Raises ScheduleError. None: write only.
        dumps: schedule -> the file's text. Raises ScheduleError. None: read only.
        recognises: whether a file's first bytes look like this format.
    """

    suffixes: tuple[str, ...]
    loads: Callable[[bytes, str], Schedule] | None
    dumps: Callable[[Schedule], str] | None
    recognises: Callable[[bytes], bool]


FORMATS: dict[str, Format] = {
    "native": Format((".json",), native.loads, native.dumps, native.recognises),
    "torch-csv": Format((".csv",), torch_csv.loads, torch_csv.dumps, torch_csv.recognises),
}


def read(path: str | Path, name: str | None = None) -> Schedule:
    """The schedule in a file.

    Args:
        path: the file.
        name: its format; found from suffix and content when None.

    Raises:
        ScheduleError: the file cannot be read, or its format is unknown; names the file and the place.
    """
    path = Path(path)
    content = read_whole(path, ScheduleError)
    name = name or _recognise(path, content)
    loads = _named(name).loads
    if loads is None:
        raise ScheduleError(f"{path}: format {name} can be written, not read")
    return loads(content, str(path))


def write(schedule: Schedule, path: str | Path, name: str | None = None) -> None:
    """Write a schedule in the format `name`, or in that of the suffix. The file is replaced whole or not at all.

    Raises:
        ScheduleError: the format is unknown, or cannot hold this schedule.
        RecycleError: the file cannot be written.
    """
    path = Path(path)
    if name is None:
        fitting = [known for known, entry in FORMATS.items() if path.suffix.lower() in entry.suffixes and entry.dumps]
        if not fitting:
            raise ScheduleError(f"{path}: no format has the suffix {path.suffix!r}: {_known()}")
        name = fitting[0]
    dumps = _named(name).dumps
    if dumps is None:
        raise ScheduleError(f"{path}: format {name} can be read, not written")
    write_whole(path, dumps(schedule))


def _recognise(path: Path, content: bytes) -> str:
    fitting = [name for name, entry in FORMATS.items() if path.suffix.lower() in entry.suffixes and entry.loads]
    if len(fitting) == 1:
        return fitting[0]
    for name in fitting or FORMATS:
        if FORMATS[name].loads and FORMATS[name].recognises(content):
            return name
    if fitting:
        return fitting[0]
    raise ScheduleError(f"{path}: neither suffix nor content is that of a known format: {_known()}")


def _named(name: str) -> Format:
    if name not in FORMATS:
        raise ScheduleError(f"{name!r} is not a format: {_known()}")
    return FORMATS[name]


def _known() -> str:
    names = (f"{name} ({' '.join(entry.suffixes)})" for name, entry in FORMATS.items())
    return f"known are {', '.join(names)}"
