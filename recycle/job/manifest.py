"""Manifests of checkpoints as JSON, read without torch, and the `[model]` section that a job takes from them.

`recycle.exec.checkpoint` reads the content into a type. Keys of `[model]` that the job does not state come from the
checkpoint in `[model] weights` if they affect what the model computes. Keys of training stay the job's: dropout,
recomputation, the sequence length of rotary models, and the weight of an auxiliary loss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from recycle.errors import JobError, RecycleError, errors_as
from recycle.files import read_whole
from recycle.job.architecture import CHOSEN_BY_JOBS, config_of, is_rotary
from recycle.job.sections import ModelSection

FORMAT, VERSION = "recycle-checkpoint", 1
MANIFEST = "manifest.json"
MODEL = "[model]"
"""Key of a manifest's identity: the `[model]` section that the weights belong to."""
HUGGING_FACE = "huggingface"
"""Folder for the files that came with the weights, in a checkpoint or next to a run's checkpoints."""
_MOST_BYTES = 2**26


class Damaged(RecycleError):
    """A checkpoint is incomplete or corrupt; the message says how."""

    code = "checkpoint-error"


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def manifest_text(content: Any) -> str:
    return json.dumps({"sha256": digest(content), "manifest": content}, indent=1)


def manifest_content(folder: Path) -> dict[str, Any]:
    """Read the content of the manifest in a checkpoint folder and verify its hash.

    Raises Damaged if it is missing or was changed, JobError if it has a newer version.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise Damaged(f"{folder}: incomplete, it has no {MANIFEST}")
    try:
        parsed = json.loads(read_whole(path, Damaged, _MOST_BYTES))
        content: dict[str, Any] = parsed["manifest"]
        if content["format"] != FORMAT or digest(content) != parsed["sha256"]:
            raise Damaged(f"{path}: damaged, its content does not match its hash")
        if content["version"] > VERSION:
            raise JobError(f"{path}: has version {content['version']}, this recycle reads up to {VERSION}; update it")
        return content
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"{path}: damaged, its content does not match its hash") from None


def require_checkpoint(folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        inside = sorted(folder.glob("checkpoints/step-*")) or sorted(folder.glob("step-*"))
        hint = f"; give one of its checkpoints, such as {inside[-1]}" if inside else ""
        raise JobError(f"{folder}: is not a checkpoint, it has no {MANIFEST}{hint}")


def carried_files(checkpoint: Path) -> Path | None:
    """Return the folder of the files that came with a checkpoint's or its run's initial weights, or None."""
    return next((files for at in (checkpoint, checkpoint.parent) if (files := at / HUGGING_FACE).is_dir()), None)


_TAKEN = (
    *("kind", "layers", "hidden", "heads", "ffn", "vocabulary", "tied"),
    *("rotary_base", "rotary_scaling", "rotary_percent", "local_rotary_base", "config"),
)


def model_of_checkpoint(folder: Path) -> ModelSection:
    """Return the `[model]` section that a checkpoint's weights belong to.

    Raises JobError if there is none or its model is unknown to recycle, Damaged as `manifest_content`.
    """
    require_checkpoint(folder)
    identity, known = manifest_content(folder).get("identity"), {f.name for f in msgspec.structs.fields(ModelSection)}
    try:
        kept = {key: value for key, value in identity[MODEL].items() if key in known}  # type: ignore[index]
        model = msgspec.convert(kept, ModelSection)
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError):
        raise JobError(f"{folder / MANIFEST}: does not state the model of the weights") from None
    if model.kind == "emulated":
        raise JobError(f"{folder}: is of an emulated model, which has no weights")
    return model


def with_model_of_weights(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the parsed keys of a job file, completed from the checkpoint that `[model] weights` names.

    `folder` is the base of the checkpoint's relative path. Raises JobError as `model_of_checkpoint`.
    """
    stated = keys.get("model")
    named = stated.get("weights") if isinstance(stated, dict) else None
    if not isinstance(stated, dict) or not isinstance(named, str):
        return dict(keys)
    checkpoint = folder / Path(named).expanduser()
    with errors_as(JobError, "[model] weights"):
        stored = model_of_checkpoint(checkpoint)
    taken = {key: msgspec.to_builtins(getattr(stored, key)) for key in _TAKEN} | (
        {} if is_rotary(stored) else {"sequence": stored.sequence}
    )
    config = stated.get("config", {})
    if isinstance(config, dict):
        config = stored.config | config
    known = {key: value for key, value in taken.items() if value is not None}
    return {**keys, "model": known | stated | {"config": config, "weights": str(checkpoint)}}


def require_model_of_weights(model: ModelSection) -> None:
    """Raise JobError, naming the first key that differs, unless the model equals that of its weights' checkpoint."""
    if model.weights is None:
        return
    with errors_as(JobError, "[model] weights"):
        stored = model_of_checkpoint(Path(model.weights))
        if stored.provider is not None:
            raise JobError(f"{model.weights}: is of a model that {stored.provider} builds; load it in [model] provider")
    stored_keys, own_keys = computed_keys(stored), computed_keys(model)
    for key in {**own_keys, **stored_keys}:
        own_value, stored_value = own_keys.get(key), stored_keys.get(key)
        if own_value != stored_value:
            stored_text = "nothing" if stored_value is None else f"{stored_value!r}"
            raise JobError(f"{key}: {own_value!r}, but the weights in {model.weights} have {stored_text}; leave it out")


def computed_keys(model: ModelSection) -> dict[str, Any]:
    """Return the keys of a model that affect what it computes, with their values."""
    keys = {f"[model] {key}": getattr(model, key) for key in _TAKEN if key != "config"}
    keys["[model] ffn"] = model.ffn if model.ffn is not None else 4 * model.hidden
    if not is_rotary(model):
        keys["[model] sequence"] = model.sequence
    fields = {key: value for key, value in config_of(model).items() if key not in CHOSEN_BY_JOBS and value is not False}
    return keys | {f"[model.config] {key}": value for key, value in fields.items()}
