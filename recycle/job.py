"""Job: everything a run is made of, read from one TOML file.

Each section is a typed struct whose fields carry their defaults; `Job.load` names the file and the key of whatever
does not fit. A plan needs `[shape]`, `[times]` and `[memory]` only; `explain_job` prints every key with its value.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from recycle.architecture import config_of, is_rotary
from recycle.cut import balanced
from recycle.endpoints import parse_endpoints
from recycle.errors import JobError, errors_as
from recycle.files import read_whole, require_text
from recycle.initial_weights import require_model_of_weights, with_model_of_weights
from recycle.named import require_name
from recycle.pricing import activation_limits, layer_seconds, parse_bytes, profile_of
from recycle.profile import Profile
from recycle.sections import ANALYTIC, AUTO, OF_GPT_DATASET, DataSection, Recompute, Sections
from recycle.shape import Shape

_MOST_BYTES, _MOST_ACTIVATIONS = 2**20, 2**31


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
        times, data, evaluation = job.times, _resolved(job.data, folder), job.evaluation
        if times.profile not in (None, ANALYTIC):
            times = msgspec.structs.replace(times, profile=str(folder / times.profile))
        if evaluation.data is not None:
            evaluation = msgspec.structs.replace(evaluation, data=_resolved(evaluation.data, folder))
        model, others = job.model, evaluation.data or DataSection()
        if any((model.provider, data.provider, others.provider, job.train.loss)):
            stated = [str(folder)] if model.import_from is None else [str(folder / path) for path in model.import_from]
            model = msgspec.structs.replace(model, import_from=stated)
        membership = job.membership
        named = ("etcd_password_file", "etcd_ca", "etcd_certificate", "etcd_key")
        files = {key: str(folder / path) for key in named if (path := getattr(membership, key)) is not None}
        read = [path for of in (data, others) for path in (of.path, *(of.paths or ()))]
        for found in (
            times.profile,
            job.model.weights,
            *read,
            *(model.import_from or ()),
            *files.values(),
        ):
            if found is not None:
                require_text(found, JobError)
        membership = msgspec.structs.replace(membership, **files)
        return msgspec.structs.replace(
            job, times=times, model=model, data=data, evaluation=evaluation, membership=membership
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
            raise JobError(_place(str(error), cls)) from None
        if job.model.split != AUTO:
            return job
        with errors_as(JobError, "[model] split"):
            split = balanced(layer_seconds(job), job.shape.stages)
        return msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, split=split))

    def validate(self) -> None:
        """Raise JobError for values that are well-typed but impossible together."""
        shape = self.shape
        for key in ("forward", "backward_input", "backward_weight", "step", "link"):
            value = getattr(self.times, key)
            values = value if isinstance(value, list) else [value]
            if isinstance(value, list) and len(value) != shape.stages:
                raise JobError(f"[times] {key}: lists {len(value)} stages, the shape has {shape.stages} (P*V)")
            for stage, entry in enumerate(values):
                if not 0 <= entry < float("inf"):
                    place = f"stage {stage} " if isinstance(value, list) else ""
                    raise JobError(f"[times] {key}: {place}must be finite and at least 0, got {entry}")
        limit = self.memory.limit
        if isinstance(limit, str):
            if limit != AUTO:
                parse_bytes(limit)
            if self.times.profile is None:
                raise JobError("[memory] limit: bytes need [times] profile, which says what an activation weighs")
        elif limit is not None:
            limits = limit if isinstance(limit, list) else [limit]
            if isinstance(limit, list) and len(limit) != shape.ranks:
                raise JobError(f"[memory] limit: lists {len(limit)} ranks, the shape has {shape.ranks}")
            if min(limits) < shape.chunks:
                raise JobError(f"[memory] limit: a worker must hold at least {shape.chunks} activation(s), got {limit}")
            if max(limits) > _MOST_ACTIVATIONS:
                raise JobError(f"[memory] limit: at most {_MOST_ACTIVATIONS} activations, got {limit}")
        if self.times.profile == ANALYTIC:
            self.layers_per_stage()
        self._validate_store()
        if self.model.provider is None and self.model.hidden % self.model.heads:
            raise JobError(f"[model] heads: {self.model.heads} heads do not divide hidden = {self.model.hidden}")
        self._validate_named()
        self._validate_family()
        if self.grid.sequence_parallel:
            if self.grid.tensor_parallel == 1:
                raise JobError("[shape] sequence_parallel: needs tensor_parallel of at least 2")
            if self.model.provider is not None or self.model.kind == "emulated":
                raise JobError("[shape] sequence_parallel: is for models that recycle builds; set it to false")
        if self.grid.expert_parallel:
            self._validate_expert_parallel()
        if self.model.kind != "emulated" and self.model.provider is None:
            self._validate_tensor_parallel()
        self._validate_data(self.data)
        if self.evaluation.data is not None:
            with errors_as(JobError, "[eval]"):
                self._validate_data(self.evaluation.data, part=1)
            if self.evaluation.data.micro_batch_size not in (1, self.data.micro_batch_size):
                raise JobError(
                    f"[eval] data.micro_batch_size: {self.evaluation.data.micro_batch_size}, but stages hand on"
                    f" {self.data.micro_batch_size} rows at a time ([data] micro_batch_size); leave it out"
                )
        elif self.evaluation.every and self.data.kind == "gpt-dataset":
            with errors_as(JobError, "[eval] data"):
                self._validate_data(self.data, part=1)
        self._validate_train()
        self._validate_integrity()

    def _validate_named(self) -> None:
        named = {
            "[model] provider": self.model.provider,
            "[data] provider": self.data.provider,
            "[eval] data.provider": None if self.evaluation.data is None else self.evaluation.data.provider,
            "[train] loss": self.train.loss,
        }
        for key, name in named.items():
            if name is None:
                continue
            require_name(name, key)
            if self.model.kind == "emulated":
                raise JobError(f'{key}: kind = "emulated" computes nothing; take out one of them')
        if self.model.weights is not None and self.model.kind == "emulated":
            raise JobError('[model] weights: kind = "emulated" has none; take out one of them')
        if self.model.weights is not None and self.model.provider is not None:
            raise JobError("[model] weights: what [model] provider builds has its own; load them in that function")
        if self.model.config and self.model.kind == "emulated":
            raise JobError('[model.config]: kind = "emulated" has no config; take out one of them')
        recompute = self.model.recompute
        if isinstance(recompute, list) and len(recompute) != self.shape.stages:
            raise JobError(f"[model] recompute: lists {len(recompute)} stages, the shape has {self.shape.stages} (P*V)")
        if isinstance(recompute, list) and self.times.profile == ANALYTIC:
            raise JobError("[model] recompute: the analytic model takes one word for all stages, not a list")
        if self.model.provider is not None and self.times.profile == ANALYTIC:
            raise JobError(
                "[times] profile: the analytic model does not know what [model] provider builds; measure it with"
                " recycle profile JOB -o FILE, and name that file"
            )

    def _validate_family(self) -> None:
        model = self.model
        if model.kind == "emulated":
            return
        if model.rotary_scaling is not None and not is_rotary(model):
            raise JobError(f'[model] rotary_scaling: kind = "{model.kind}" has learned positions; leave it out')
        fields = config_of(model)
        for key in ("kv_channels", "num_query_groups", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk"):
            if not isinstance(fields.get(key, 1), int) or fields.get(key, 1) < 1:
                raise JobError(f"[model.config] {key}: must be a whole number of at least 1, got {fields[key]!r}")
        groups = int(fields.get("num_query_groups", model.heads))
        if model.provider is None and model.heads % groups:
            raise JobError(f"[model.config] num_query_groups: {groups} groups do not divide heads = {model.heads}")

    def _validate_data(self, data: DataSection, part: int = 0) -> None:
        """Raise JobError for keys that are impossible together, or that leave nothing in a part of a split."""
        if data.provider is not None and data.kind != "text":
            raise JobError(f'[data] provider: and kind = "{data.kind}" name the data twice; take out one of them')
        if data.kind == "megatron" and data.path is None:
            raise JobError('[data] path: kind = "megatron" needs the path of a .bin and .idx file, without the suffix')
        if data.kind != "gpt-dataset":
            defaults = DataSection()
            for key in OF_GPT_DATASET:
                if getattr(data, key) != getattr(defaults, key):
                    raise JobError(f'[data] {key}: needs kind = "gpt-dataset"')
            return
        if (data.path is None) == (data.paths is None):
            raise JobError("[data] path: give the path of a .bin and .idx file without the suffix, or several as paths")
        if data.weights is not None and len(data.weights) != len(data.paths or [data.path]):
            raise JobError(f"[data] weights: {len(data.weights)} for {len(data.paths or [data.path])} paths")
        shares = [float(share) for share in data.split.split(",")]
        if part >= len(shares) or shares[part] <= 0:
            names = "training, the first", "validation, the second"
            raise JobError(f'[data] split: "{data.split}" gives {names[part]} of them, nothing')
        for key in ("mask_loss", "reset_positions"):
            if getattr(data, key) and data.end_of_document is None:
                raise JobError(f"[data] {key}: needs end_of_document, the number of the token that ends a document")
        if data.reset_positions and is_rotary(self.model):
            raise JobError(
                f'[data] reset_positions: kind = "{self.model.kind}" has rotary positions, which megatron-core counts'
                f" through a sample; leave it out"
            )

    def _validate_expert_parallel(self) -> None:
        count, experts = self.grid.tensor_parallel, config_of(self.model).get("num_moe_experts")
        if count == 1:
            raise JobError("[shape] expert_parallel: needs tensor_parallel of at least 2")
        if self.model.provider is not None or experts is None:
            raise JobError(
                '[shape] expert_parallel: is for mixtures of experts that recycle builds, such as kind = "mixtral"; set'
                " it to false"
            )
        if int(experts) % count:
            raise JobError(
                f"[model.config] num_moe_experts: {experts} is not divisible by tensor_parallel = {count}, and"
                " [shape] expert_parallel gives each tensor rank as many experts"
            )

    def _validate_tensor_parallel(self) -> None:
        model, count = self.model, self.grid.tensor_parallel
        ffn = model.ffn if model.ffn is not None else 4 * model.hidden
        groups = int(config_of(model).get("num_query_groups", model.heads))
        pad = (
            f"pad it to {-(-model.vocabulary // count) * count}"
            if model.weights is None
            else "its weights have as many"
        )
        if self.grid.sequence_parallel:
            if "num_moe_experts" in config_of(model):
                raise JobError(
                    "[shape] sequence_parallel: the router of a mixture of experts looks at all tokens; set it to false"
                )
            if model.sequence % count:
                raise JobError(
                    f"[model] sequence: {model.sequence} is not divisible by tensor_parallel = {count}, and"
                    " [shape] sequence_parallel gives each tensor rank as many tokens"
                )
        for key, value, remedy in (
            ("heads", model.heads, "each tensor rank has as many"),
            ("ffn", ffn, "each tensor rank has as many units"),
            ("config num_query_groups", groups, "each tensor rank has as many"),
            ("vocabulary", model.vocabulary, pad),
        ):
            if value % count:
                raise JobError(f"[model] {key}: {value} is not divisible by tensor_parallel = {count}; {remedy}")

    def _validate_train(self) -> None:
        train = self.train
        self._validate_shards()
        if train.reduce_buckets > 1 and not self.planner.decoupled:
            raise JobError(
                f"[train] reduce_buckets: {train.reduce_buckets} buckets are summed while W's run, which"
                " [planner] decoupled = false does without; set it to true, or reduce_buckets to 1"
            )
        if train.minimum_learning_rate and train.schedule in (None, "constant"):
            raise JobError('[train] minimum_learning_rate: needs another schedule than "constant"')
        if train.decay is not None and train.schedule != "warmup-stable-decay":
            raise JobError('[train] decay: needs schedule = "warmup-stable-decay"')
        if train.decay is not None and train.decay > train.steps - train.warmup:
            raise JobError(
                f"[train] decay: {train.decay} iterations, but {train.steps - train.warmup} come after the warm-up"
            )
        if train.minimum_learning_rate > train.learning_rate:
            raise JobError(
                f"[train] minimum_learning_rate: {train.minimum_learning_rate:g} is above learning_rate ="
                f" {train.learning_rate:g}"
            )
        if train.schedule is not None and train.warmup >= train.steps:
            raise JobError(f"[train] warmup: {train.warmup} iterations, but steps = {train.steps}; schedule needs less")

    def _validate_shards(self) -> None:
        train = self.train
        if not train.sharded_optimizer:
            if train.optimizer_copies != type(train)().optimizer_copies:
                raise JobError("[train] optimizer_copies: needs sharded_optimizer = true")
            return
        if train.optimizer_copies > self.grid.pipelines:
            raise JobError(
                f"[train] optimizer_copies: {train.optimizer_copies}, but [shape] pipelines gives a stage"
                f" {self.grid.pipelines} host(s), each of which holds a shard once; use fewer"
            )
        for key, is_there in (
            ('[planner] layout: "elastic" is', self.planner.layout == "elastic"),
            ("[planner] move: is", self.planner.move),
        ):
            if is_there:
                raise JobError(f"{key} not there yet with [train] sharded_optimizer = true; leave out one of the two")

    def _validate_integrity(self) -> None:
        every, digests, kept = self.integrity.every, self.integrity.digests, self.train.checkpoint_every
        if not self.integrity.compares_states:
            return
        key, interval = ("every", every) if every else ("digests", digests)
        if self.grid.pipelines < 2:
            compares = "who could run its work again" if every else "to compare its state with"
            raise JobError(f"[integrity] {key}: with 1 pipeline no worker has a peer {compares}; write 0")
        if self.planner.layout == "elastic" or self.planner.move:
            raise JobError(
                f"[integrity] {key}: a worker that comes to host other layers has not kept their states; write"
                f' [planner] layout = "fixed" and move = false, or {key} = 0'
            )
        if self.train.sharded_optimizer:
            raise JobError(
                f"[integrity] {key}: not there yet with [train] sharded_optimizer = true, whose hosts hold different"
                " shards; leave out one of the two"
            )
        if every and self.grid.tensor_parallel > 1:
            raise JobError(
                f"[integrity] every: not there yet with [shape] tensor_parallel = {self.grid.tensor_parallel}, where a"
                " replay takes all processes of a worker at once; write digests = N to compare states alone"
            )
        if every and digests not in (0, every):
            raise JobError(
                f"[integrity] digests: {digests}, but with every = {json.dumps(every)} states are compared whenever"
                " everything was replayed once; leave digests out"
            )
        if isinstance(interval, int) and kept % interval:
            raise JobError(
                f"[integrity] {key}: {interval} does not divide [train] checkpoint_every = {kept}, so that checkpoints"
                " would be kept that nobody compares; change one of the two"
            )

    def _validate_store(self) -> None:
        membership = self.membership
        if membership.store != "launcher":
            try:
                parse_endpoints(membership.store)
            except JobError as error:
                raise JobError(f'[membership] store: {error}; or leave it at "launcher"') from None
        if (membership.etcd_certificate is None) != (membership.etcd_key is None):
            raise JobError("[membership] etcd_certificate and etcd_key: give both or neither")

    def to_toml(self) -> str:
        """The job as TOML text with every key resolved; `Job.from_toml` reads it back to an equal job."""
        lines: list[str] = []
        for section in msgspec.structs.fields(Job):
            values = msgspec.to_builtins(getattr(self, section.name))
            lines.append(f"[{section.encode_name}]")
            lines += [f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None]
            lines.append("")
        return "\n".join(lines)


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


def explain_job(job: Job) -> str:
    """Every key with the value that the job gives it, as TOML; keys left at their default say so."""
    lines: list[str] = []
    for section in msgspec.structs.fields(Job):
        kind: Any = section.type
        values = getattr(job, section.name)
        about = (kind.__doc__ or "").splitlines()[0].split(": ", 1)[-1]
        lines.append(f"[{section.encode_name}]  # {about}")
        for key in msgspec.structs.fields(kind):
            value = getattr(values, key.name)
            text = f"# {key.encode_name}" if value is None else f"{key.encode_name} = {_toml_value(value)}"
            default = key.default if key.default_factory is msgspec.NODEFAULT else key.default_factory()
            lines.append(f"{text:<36}  # default" if value == default else text)
        lines.append("")
    return "\n".join(lines)


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


def _resolved(data: DataSection, folder: Path) -> DataSection:
    """The section with its paths below the folder of the file that they stand in."""

    def absolute(path: str) -> str:
        return str(folder / Path(path).expanduser())

    return msgspec.structs.replace(
        data,
        path=None if data.path is None else absolute(data.path),
        paths=None if data.paths is None else [absolute(path) for path in data.paths],
        cache=None if data.cache is None else absolute(data.cache),
    )


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        stated = {key: entry for key, entry in value.items() if entry is not None}
        return f"{{{', '.join(f'{_toml_value(key)} = {_toml_value(entry)}' for key, entry in stated.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _place(message: str, job: type[Job]) -> str:
    """msgspec's "... - at `$.shape.ranks`" as "[shape] ranks: ...", with the words that the key takes, if it does."""
    match = re.fullmatch(r"(.*) - at `\$\.?([^`]*)`", message, flags=re.DOTALL)
    if match is None:
        return _about_keys(message, job, "") or message
    section, _, key = match[2].partition(".")
    where = f"[{section}]" + (f" {key}" if key else "") if section else "top level"
    if not key and (said := _about_keys(match[1], job, section)) is not None:
        return said
    return f"{where}: {match[1][0].lower()}{match[1][1:]}{_remedy(job, section, key)}"


def _about_keys(message: str, job: type[Job], section: str) -> str | None:
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


def _keys(job: type[Job], section: str) -> list[str]:
    """The keys of a section of the job file; its sections for ""."""
    found: Any = msgspec.inspect.type_info(job)
    if section:
        found = next(each.type for each in found.fields if each.encode_name == section)
    return [each.encode_name for each in getattr(found, "fields", ())]


def _remedy(job: type[Job], section: str, key: str) -> str:
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
