"""Job: the complete description of a run, read from one TOML file.

Each section is a typed struct with defaults. A plan needs only `[shape]`, `[times]` and `[memory]`.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import msgspec

from recycle.errors import JobError, errors_as
from recycle.files import read_whole, require_text
from recycle.job.cut import balanced
from recycle.job.manifest import require_model_of_weights, with_model_of_weights
from recycle.job.pricing import activation_limits, layer_seconds, profile_of
from recycle.job.profile import Profile
from recycle.job.rules import require_possible
from recycle.job.sections import ANALYTIC, AUTO, Recompute, Sections
from recycle.job.shape import Placing, Shape

_MOST_BYTES = 2**20
_FORMER_SECTIONS = {"dials": "logging"}
_PATHS_OF_DATA = ("path", "paths", "cache")
_PATHS_OF_MEMBERSHIP = ("etcd_password_file", "etcd_ca", "etcd_certificate", "etcd_key")
S = TypeVar("S", bound=msgspec.Struct)


class Job(Sections, frozen=True):
    """One training job. Read it with `Job.load`, or pass the sections.

    Attributes:
        planned_by: `module:function` that makes plans for runs without a plan library. The public API sets it, because
            this package must not import the planner.
        settled_by: `module:function` that chooses the placement and the split that the job leaves open; set in the
            same way.
    """

    planned_by: ClassVar[str]
    settled_by: ClassVar[str]

    def placed(self, placement: Placing | Literal["auto"]) -> Self:
        """Return the job with another placement."""
        return msgspec.structs.replace(self, grid=msgspec.structs.replace(self.grid, placement=placement))

    def without_weights(self) -> Self:
        """Return the job without `[model] weights`, for processes that receive their state elsewhere."""
        return msgspec.structs.replace(self, model=msgspec.structs.replace(self.model, weights=None))

    def with_cut(self, cut: Sequence[int]) -> Job:
        """Return the job with its model cut into stages of the given layers (`Shape.cut`); itself for an empty cut.

        Raises:
            JobError: `[model] recompute` is a list over the job's stages.
        """
        if not cut:
            return self
        recompute = self.model.recompute
        if isinstance(recompute, list) and len(set(recompute)) > 1:
            raise JobError(
                "[model] recompute: lists a value for each stage of the job, but the stages of this schedule differ;"
                " write one value for all"
            )
        return CutJob(**self.sections(), cut=tuple(cut))

    def sections(self) -> dict[str, Any]:
        """Return the job's sections by name."""
        return {field.name: getattr(self, field.name) for field in msgspec.structs.fields(Job)}

    def profile(self) -> Profile:
        """Return the times and bytes to plan with. Reads a profile file at each call; see `price`."""
        return profile_of(self)

    def activation_limits(self) -> list[float] | None:
        """Return the activations (in chunks) that a worker of each rank may hold; None: unlimited."""
        return activation_limits(self)

    @property
    def seconds_per_unit(self) -> float | None:
        """Seconds per unit of the profile's times; None if unknown."""
        if self.model.kind == "emulated":
            return self.model.seconds_per_unit or None
        return 1.0 if self.times.profile is not None else None

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a job file. Raises JobError that names the file, the key and the expected type."""
        text = _read_text(path)
        folder = Path(path).resolve().parent  # paths in a job file are relative to the file
        with errors_as(JobError, str(path)):
            keys = _parse_toml(text)
            for former in _FORMER_SECTIONS.keys() & keys.keys():
                notice = f"{path}: [{former}] is now named [{_FORMER_SECTIONS[former]}]; rename the section"
                warnings.warn(notice, FutureWarning, stacklevel=2)
            job = cls._read(with_model_of_weights(keys, folder))
            require_model_of_weights(job.model)
            job.validate()
        model = job.model
        if job.named_functions():
            stated = ["."] if model.import_from is None else model.import_from
            model = _resolve_paths(msgspec.structs.replace(model, import_from=stated), folder, "import_from")
        times, evaluation = job.times, job.evaluation
        if times.profile != ANALYTIC:
            times = _resolve_paths(times, folder, "profile")
        if evaluation.data is not None:
            evaluation = msgspec.structs.replace(
                evaluation, data=_resolve_paths(evaluation.data, folder, *_PATHS_OF_DATA)
            )
        return msgspec.structs.replace(
            job,
            times=times,
            model=_resolve_paths(model, folder, "weights"),
            data=_resolve_paths(job.data, folder, *_PATHS_OF_DATA),
            evaluation=evaluation,
            membership=_resolve_paths(job.membership, folder, *_PATHS_OF_MEMBERSHIP),
        )

    @classmethod
    def from_toml(cls, text: str, name: str = "job") -> Job:
        """Parse and validate job text; paths stay as written, and `name` starts every error message.

        Keys come from the text and defaults only, never from `[model] weights`.
        """
        with errors_as(JobError, name):
            job = cls._read(_parse_toml(text))
            job.validate()
        return job

    @classmethod
    def of_run(cls, directory: str | Path) -> Job:
        """Read the resolved job of a run directory. Raises JobError that names the file and the key."""
        path = Path(directory) / "job.toml"
        return cls.from_toml(_read_text(path), str(path))

    @classmethod
    def _read(cls, keys: dict[str, Any]) -> Job:
        for former, name in _FORMER_SECTIONS.items():
            if former in keys and name in keys:
                raise JobError(f"[{former}] is the former name of [{name}]; write [{name}] only")
        keys = {_FORMER_SECTIONS.get(name, name): value for name, value in keys.items()}
        try:
            job = msgspec.convert(keys, type=cls)
        except msgspec.ValidationError as error:
            raise JobError(_locate_error(str(error), cls)) from None
        if job.model.split != AUTO:
            return job
        with errors_as(JobError, "[model] split"):
            split = list(balanced(tuple(layer_seconds(job)), job.shape.stages))
        model = msgspec.structs.replace(job.model, split=split)
        return EvenedJob(**job.sections() | {"model": model}, evened=tuple(split))

    def validate(self) -> None:
        require_possible(self)

    def to_toml(self) -> str:
        """Return the job as TOML text with every key resolved; `Job.from_toml` reads it back to an equal job."""
        lines: list[str] = []
        for section in msgspec.structs.fields(Job):
            values = msgspec.to_builtins(getattr(self, section.name))
            lines.append(f"[{section.encode_name}]")
            lines += [f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None]
            lines.append("")
        return "\n".join(lines)


def is_stated(path: str | Path, section: str, key: str) -> bool:
    """Return whether a job file states a key explicitly. Raises JobError as `Job.load` does."""
    with errors_as(JobError, str(path)):
        stated = _parse_toml(_read_text(path)).get(section)
    return isinstance(stated, dict) and key in stated


class EvenedJob(Job, frozen=True, kw_only=True):
    """A job with `[model] split = "auto"`. It has the split `evened` until `price` chooses one."""

    evened: tuple[int, ...]

    @property
    def is_open(self) -> bool:
        """Whether the split is still the one that was evened."""
        return self.model.split == list(self.evened)


class CutJob(Job, frozen=True, kw_only=True):
    cut: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return replace(super().shape, cut=self.cut)

    def layers_per_stage(self) -> list[int]:
        return list(self.cut)

    def recompute_of(self, stage: int) -> Recompute:
        recompute = self.model.recompute
        return recompute[0] if isinstance(recompute, list) else recompute


class PricedJob(Job, frozen=True, kw_only=True):
    prices: Profile

    @property
    def limits(self) -> list[float] | None:
        """Return the activations (in chunks) that a worker of each rank may hold; None: unlimited."""
        return activation_limits(self, self.prices)

    def with_sections(self, **sections: Any) -> PricedJob:
        """Return the job with other sections and their prices. Raises JobError as `price` does."""
        return price(Job(**self.sections() | sections))


def price(job: Job) -> PricedJob:
    """Return the job with its prices; a `PricedJob` is returned unchanged.

    In place of `[shape] placement = "auto"` and `[model] split = "auto"` the job gets the placement and the split of
    the shortest first fault-free plan.

    Raises:
        JobError: the profile cannot be read.
    """
    if isinstance(job, PricedJob):
        return job
    if job.grid.placement == AUTO or isinstance(job, EvenedJob):
        module, _, function = job.settled_by.partition(":")
        job = getattr(import_module(module), function)(job)
    return PricedJob(**msgspec.structs.asdict(job), prices=profile_of(job))


def _read_text(path: str | Path) -> str:
    content = read_whole(path, JobError, _MOST_BYTES)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def _parse_toml(text: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        raise JobError("is JSON, but a job file is TOML; for a plan or schedule use recycle check, simulate or view")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of over 4300 digits, deep nesting
        raise JobError(f"not valid TOML: {error}") from None


def _resolve_paths(section: S, folder: Path, *keys: str) -> S:
    changes: dict[str, Any] = {}
    for key in keys:
        stated = getattr(section, key)
        if stated is not None:
            several = [stated] if isinstance(stated, str) else stated
            paths = [str(folder / Path(path).expanduser()) for path in several]
            for path in paths:
                require_text(path, JobError)
            changes[key] = paths[0] if isinstance(stated, str) else paths
    return msgspec.structs.replace(section, **changes)


def toml_value(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        stated = {key: entry for key, entry in value.items() if entry is not None}
        return f"{{{', '.join(f'{toml_value(key)} = {toml_value(entry)}' for key, entry in stated.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _locate_error(message: str, job: type[Sections]) -> str:
    match = re.fullmatch(r"(.*) - at `\$\.?([^`]*)`", message, flags=re.DOTALL)
    if match is None:
        return _explain_key_error(message, job, "") or message
    section, _, key = match[2].partition(".")
    where = f"[{section}]" + (f" {key}" if key else "") if section else "top level"
    if not key and (text := _explain_key_error(match[1], job, section)) is not None:
        return text
    return f"{where}: {match[1][0].lower()}{match[1][1:]}{_accepted_values(job, section, key)}"


def _explain_key_error(message: str, job: type[Sections], section: str) -> str | None:
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
    return f"{named}: unknown {what}; {hint}"


def _keys(job: type[Sections], section: str) -> list[str]:
    section_type: Any = msgspec.inspect.type_info(job)
    if section:
        section_type = next(each.type for each in section_type.fields if each.encode_name == section)
    return [each.encode_name for each in getattr(section_type, "fields", ())]


def _accepted_values(job: type[Sections], section: str, key: str) -> str:
    value_type: Any = msgspec.inspect.type_info(job)
    for name in (section, key):
        fields = {each.encode_name: each.type for each in getattr(value_type, "fields", ())}
        value_type = fields.get(name)
    types = getattr(value_type, "types", (value_type,))
    words = [json.dumps(word) for kind in types for word in getattr(kind, "values", ())]
    if not words:
        return ""
    numbers = (msgspec.inspect.IntType, msgspec.inspect.FloatType)
    return f"; write {' or '.join(words)}" + (", or a number" if any(isinstance(k, numbers) for k in types) else "")
