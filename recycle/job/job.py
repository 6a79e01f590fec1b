"""Job: everything a run is made of, read from one TOML file.

Each section is a typed struct whose fields carry their defaults; `Job.load` names the file and the key of whatever
does not fit. A plan needs `[shape]`, `[times]` and `[memory]` only; `recycle.job.reference`
describes every key.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from recycle.errors import JobError, errors_as
from recycle.files import read_whole, require_text
from recycle.job.cut import balanced
from recycle.job.manifest import require_model_of_weights, with_model_of_weights
from recycle.job.pricing import activation_limits, layer_seconds, profile_of
from recycle.job.profile import Profile
from recycle.job.rules import require_possible
from recycle.job.sections import ANALYTIC, AUTO, DataSection, Recompute, Sections
from recycle.job.shape import Shape

_MOST_BYTES = 2**20
_PATHS_OF_DATA = ("path", "paths", "cache")
_PATHS_OF_MEMBERSHIP = ("etcd_password_file", "etcd_ca", "etcd_certificate", "etcd_key")
S = TypeVar("S", bound=msgspec.Struct)


class Job(Sections, frozen=True, forbid_unknown_fields=True):
    """One training job. Read with `Job.load`; built in code by passing the sections.

    Attributes:
        planned_by: `module:function` that makes plans for runs which are given none; set by the public API, since the
            planner stands above the job and beside the executor.
    """

    planned_by: ClassVar[str]

    def without_weights(self) -> Self:
        """The job for processes whose state is another one than that which `[model] weights` names."""
        return msgspec.structs.replace(self, model=msgspec.structs.replace(self.model, weights=None))

    def with_cut(self, cut: Sequence[int]) -> Job:
        """The job with its model cut into stages of so many layers (`Shape.cut`); itself for an empty cut.

        Raises:
            JobError: it states what is run again for each of its own stages.
        """
        if not cut:
            return self
        recompute = self.model.recompute
        if isinstance(recompute, list) and len(set(recompute)) > 1:
            raise JobError(
                "[model] recompute: lists a word for each stage, but other layers make up the stages of this schedule;"
                " write one word for all"
            )
        return CutJob(
            **{field.name: getattr(self, field.name) for field in msgspec.structs.fields(Job)}, cut=tuple(cut)
        )

    def profile(self) -> Profile:
        """The times and bytes to plan with, for scripts; reads a profile's file each time (see `price`)."""
        return profile_of(self)

    def activation_limits(self) -> list[float] | None:
        """Activations (in chunks) that the worker of each rank may hold, for scripts; None when there is no limit."""
        return activation_limits(self)

    @property
    def seconds_per_unit(self) -> float | None:
        """Seconds that one unit of the profile's times lasts when the job runs; None where that is not known.

        A profile file holds measured seconds; the numbers of `[times]` are in any unit.
        """
        if self.model.kind == "emulated":
            return self.model.seconds_per_unit or None
        return 1.0 if self.times.profile is not None else None

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a job file. Raises JobError that names the file, the key and the expected type."""
        text = _text(path)
        folder = Path(path).resolve().parent  # paths in a job file are relative to the file
        with errors_as(JobError, str(path)):
            job = cls._read(with_model_of_weights(_parsed(text), folder))
            require_model_of_weights(job.model)
            job.validate()
        model, others = job.model, job.evaluation.data or DataSection()
        if any((model.provider, job.data.provider, others.provider, job.train.loss)):
            stated = ["."] if model.import_from is None else model.import_from
            model = _resolved(msgspec.structs.replace(model, import_from=stated), folder, "import_from")
        times, evaluation = job.times, job.evaluation
        if times.profile != ANALYTIC:
            times = _resolved(times, folder, "profile")
        if evaluation.data is not None:
            evaluation = msgspec.structs.replace(evaluation, data=_resolved(evaluation.data, folder, *_PATHS_OF_DATA))
        return msgspec.structs.replace(
            job,
            times=times,
            model=_resolved(model, folder, "weights"),
            data=_resolved(job.data, folder, *_PATHS_OF_DATA),
            evaluation=evaluation,
            membership=_resolved(job.membership, folder, *_PATHS_OF_MEMBERSHIP),
        )

    @classmethod
    def from_toml(cls, text: str, name: str = "job") -> Job:
        """Parse and validate job text, whose paths are not relative to a file; `name` begins every error message.

        Every key that the job needs is in the text or has a default: none is taken from `[model] weights`.
        """
        with errors_as(JobError, name):
            job = cls._read(_parsed(text))
            job.validate()
        return job

    @classmethod
    def of_run(cls, directory: str | Path) -> Job:
        """The job of a run directory, as it was resolved. Raises JobError that names the file and the key."""
        path = Path(directory) / "job.toml"
        return cls.from_toml(_text(path), str(path))

    @classmethod
    def _read(cls, keys: dict[str, Any]) -> Job:
        try:
            job = msgspec.convert(keys, type=cls)
        except msgspec.ValidationError as error:
            raise JobError(_placed(str(error), cls)) from None
        if job.model.split != AUTO:
            return job
        with errors_as(JobError, "[model] split"):
            split = list(balanced(tuple(layer_seconds(job)), job.shape.stages))
        return msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, split=split))

    def validate(self) -> None:
        """Raise JobError for values that are well-typed but impossible together."""
        require_possible(self)

    def to_toml(self) -> str:
        """The job as TOML text with every key resolved; `Job.from_toml` reads it back to an equal job."""
        lines: list[str] = []
        for section in msgspec.structs.fields(Job):
            values = msgspec.to_builtins(getattr(self, section.name))
            lines.append(f"[{section.encode_name}]")
            lines += [f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None]
            lines.append("")
        return "\n".join(lines)


def is_stated(path: str | Path, section: str, key: str) -> bool:
    """Whether a job file states a key itself, so that its value is not the default. Raises JobError as `Job.load`."""
    with errors_as(JobError, str(path)):
        stated = _parsed(_text(path)).get(section)
    return isinstance(stated, dict) and key in stated


class CutJob(Job, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job with its model cut into other stages, as `Job.with_cut` makes it.

    Attributes:
        cut: layers of each stage.
    """

    cut: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return replace(super().shape, cut=self.cut)

    def layers_per_stage(self) -> list[int]:
        return list(self.cut)

    def recompute_of(self, stage: int) -> Recompute:
        recompute = self.model.recompute
        return recompute[0] if isinstance(recompute, list) else recompute


class PricedJob(Job, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job with what its instructions cost, as `price` makes it.

    Attributes:
        prices: seconds and bytes of the instructions.
    """

    prices: Profile

    @property
    def limits(self) -> list[float] | None:
        """Activations (in chunks) that the worker of each rank may hold; None when there is no limit."""
        return activation_limits(self, self.prices)

    def with_sections(self, **sections: Any) -> PricedJob:
        """The job with other sections, priced by them. Raises JobError as `price` does."""
        changed = {**{field.name: getattr(self, field.name) for field in msgspec.structs.fields(Job)}, **sections}
        return price(Job(**changed))


def price(job: Job) -> PricedJob:
    """The job with its prices; one that has them is returned as it is.

    Raises:
        JobError: the profile cannot be read.
    """
    if isinstance(job, PricedJob):
        return job
    return PricedJob(**msgspec.structs.asdict(job), prices=profile_of(job))


def _text(path: str | Path) -> str:
    content = read_whole(path, JobError, _MOST_BYTES)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def _parsed(text: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        raise JobError("is JSON, and a job file is TOML; a plan or schedule goes to recycle check, simulate or view")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # beside TOMLDecodeError: numbers of over 4300 digits, nesting
        raise JobError(f"not valid TOML: {error}") from None


def _resolved(section: S, folder: Path, *keys: str) -> S:
    """The section with the paths of these keys below a folder. Raises JobError for one that is not UTF-8."""
    found: dict[str, Any] = {}
    for key in keys:
        stated = getattr(section, key)
        if stated is not None:
            several = [stated] if isinstance(stated, str) else stated
            paths = [str(folder / Path(path).expanduser()) for path in several]
            for path in paths:
                require_text(path, JobError)
            found[key] = paths[0] if isinstance(stated, str) else paths
    return msgspec.structs.replace(section, **found)


def toml_value(value: Any) -> str:
    """A value of a key as TOML."""
    if isinstance(value, dict):
        stated = {key: entry for key, entry in value.items() if entry is not None}
        return f"{{{', '.join(f'{toml_value(key)} = {toml_value(entry)}' for key, entry in stated.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _placed(message: str, job: type[Sections]) -> str:
    """msgspec's "... - at `$.shape.ranks`" as "[shape] ranks: ...", with the words that the key takes, if it does."""
    match = re.fullmatch(r"(.*) - at `\$\.?([^`]*)`", message, flags=re.DOTALL)
    if match is None:
        return _about_keys(message, job, "") or message
    section, _, key = match[2].partition(".")
    where = f"[{section}]" + (f" {key}" if key else "") if section else "top level"
    if not key and (said := _about_keys(match[1], job, section)) is not None:
        return said
    return f"{where}: {match[1][0].lower()}{match[1][1:]}{_remedy(job, section, key)}"


def _about_keys(message: str, job: type[Sections], section: str) -> str | None:
    """What is said of a key that is missing or unknown, with the remedy; None when msgspec's words are not of keys."""
    match = re.fullmatch(r"Object (missing required|contains unknown) field `([^`]*)`", message)
    if match is None:
        return None
    key, known = match[2], _keys(job, section)
    named = f"[{section}] {key}" if section else f"[{key}]"
    if match[1] == "missing required":
        example = "; write for example pipelines = 3, ranks = 4, micro_batches = 6 below [shape]"
        return f"{named}: is missing" + (example if "shape" in (key, section) else "")
    close = difflib.get_close_matches(key, known, 1)
    what = "key" if section else "section"
    hint = f'did you mean "{close[0]}"?' if close else f"known are {', '.join(known)}"
    return f"{named}: there is no such {what}; {hint}"


def _keys(job: type[Sections], section: str) -> list[str]:
    """The keys of a section of the job file; its sections for ""."""
    found: Any = msgspec.inspect.type_info(job)
    if section:
        found = next(each.type for each in found.fields if each.encode_name == section)
    return [each.encode_name for each in getattr(found, "fields", ())]


def _remedy(job: type[Sections], section: str, key: str) -> str:
    """The words that a key takes, and whether a number does as well: "; write "all" or "off", or a number"."""
    found: Any = msgspec.inspect.type_info(job)
    for name in (section, key):
        fields = {each.encode_name: each.type for each in getattr(found, "fields", ())}
        found = fields.get(name)
    types = getattr(found, "types", (found,))
    words = [json.dumps(word) for kind in types for word in getattr(kind, "values", ())]
    if not words:
        return ""
    numbers = (msgspec.inspect.IntType, msgspec.inspect.FloatType)
    return f"; write {' or '.join(words)}" + (", or a number" if any(isinstance(k, numbers) for k in types) else "")
