"""File formats of schedules; the suffix determines the format, then the content."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from recycle.errors import JobError, ScheduleError
from recycle.files import read_whole, write_whole
from recycle.ir import native
from recycle.ir.families import FAMILIES
from recycle.ir.formats import chrome_trace, megatron_table, torch_csv
from recycle.ir.formats.schedule_input import ScheduleInput, Unpacked, unpack
from recycle.ir.schedule import Schedule
from recycle.job.profile import Profile
from recycle.job.shape import Shape


@dataclass(frozen=True)
class Format:
    """One file format.

    Attributes:
        suffixes: file suffixes, with dots. For writing, the longest matching suffix counts, then the first format.
        loads: (content, name for error messages, maximum instructions) -> schedule, with times if the format has any.
        dumps: schedule (and profile if `timed`) -> the text, whole or in parts.
        recognises: whether content looks like this format.
        timed: whether written files contain times, which require a profile.
    """

    suffixes: tuple[str, ...]
    loads: Callable[[bytes, str, int], Schedule | ScheduleInput]
    dumps: Callable[..., str | Iterable[str]]
    recognises: Callable[[bytes], bool]
    timed: bool = False


FORMATS: dict[str, Format] = {
    "native": Format((".json",), Schedule.loads, Schedule.dumps, native.recognises),
    "chrome-trace": Format(
        (".trace.json", ".chrome.json", ".json"),
        chrome_trace.load_input,
        chrome_trace.dumps,
        chrome_trace.recognises,
        timed=True,
    ),
    "megatron-table": Format((".json",), megatron_table.loads, megatron_table.dumps, megatron_table.recognises),
    "torch-csv": Format((".csv",), torch_csv.loads, torch_csv.dumps, torch_csv.recognises),
}


def read_input(path: str | Path, name: str | None = None) -> ScheduleInput:
    """Read a file of format `name` (None: detected), zipped or not, or a directory of several files.

    Raises:
        ScheduleError: the file cannot be read, its format is unknown, or its content is too large for its size.
    """
    path = Path(path)
    if path.is_dir():
        if name not in (None, "chrome-trace"):
            raise ScheduleError(f"{path}: is a directory, which format {name} cannot read; use chrome-trace")
        return chrome_trace.load_directory(path)
    return load_unpacked(unpack(read_whole(path, ScheduleError), str(path)), str(path), name)


def read(path: str | Path, name: str | None = None) -> Schedule:
    """Read the order in a file or directory, without times; logs omissions. Arguments and errors as in `read_input`."""
    return read_input(path, name).order()


def named_schedule(name: str, shape: Shape) -> Schedule:
    """Build the family `name` for `shape`, or read the file `name`. Raises JobError, ScheduleError."""
    if name in FAMILIES:
        return FAMILIES[name](shape)
    if not Path(name).exists():
        raise JobError(f"schedule {name}: is neither a file nor a family; families are {', '.join(FAMILIES)}")
    return read(name)


def load_unpacked(content: Unpacked, path: str, name: str | None = None) -> ScheduleInput:
    """Parse the content of a file as `read_input`; `path` is used for its suffix and in error messages only."""
    entry = _named(name or _recognise(path.removesuffix(".gz"), content.text))
    held = entry.loads(content.text, path, content.most)
    return held if isinstance(held, ScheduleInput) else ScheduleInput(path, held)


def written_as(path: str | Path, name: str | None = None) -> str:
    """Return the format for `write`: `name`, or the format of the suffix. Raises ScheduleError if unknown."""
    if name is not None:
        _named(name)
        return name
    best = max(FORMATS, key=lambda known: len(_suffix(path, FORMATS[known])))
    if not _suffix(path, FORMATS[best]):
        raise ScheduleError(f"{path}: no format has the suffix {Path(path).suffix!r}: {_known()}")
    return best


def write(schedule: Schedule, path: str | Path, name: str | None = None, profile: Profile | None = None) -> None:
    """Write a schedule atomically in the format `name`, or the format of the suffix; `profile` gives the times.

    Raises:
        ScheduleError: the format is unknown, cannot represent the schedule, or has no times for a profile.
        RecycleError: the file cannot be written.
    """
    name = written_as(path, name)
    entry = _named(name)
    if profile is not None and not entry.timed:
        raise ScheduleError(f"{path}: format {name} stores no times, so it cannot use a profile")
    write_whole(path, entry.dumps(schedule, profile) if entry.timed else entry.dumps(schedule))


def _recognise(path: str, content: bytes) -> str:
    fitting = [name for name, entry in FORMATS.items() if _suffix(path, entry)]
    if native.recognises(content):
        return "native"  # `save` accepts any file name
    if len(fitting) != 1:
        fitting = [name for name in fitting or FORMATS if FORMATS[name].recognises(content)] or fitting
    if not fitting:
        raise ScheduleError(
            f"{path}: is not a schedule file: its suffix and content are of no known format: {_known()}"
        )
    return fitting[0]


def _suffix(path: str | Path, entry: Format) -> str:
    fitting = (suffix for suffix in entry.suffixes if Path(path).name.lower().endswith(suffix))
    return max(fitting, key=len, default="")


def _named(name: str) -> Format:
    if name not in FORMATS:
        raise ScheduleError(f"{name!r} is not a format: {_known()}")
    return FORMATS[name]


def _known() -> str:
    names = (f"{name} ({' '.join(entry.suffixes)})" for name, entry in FORMATS.items())
    return f"known are {', '.join(names)}"
