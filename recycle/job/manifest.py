"""The manifest of a checkpoint as JSON, read without torch: jobs take the shape of a model from it.

What a manifest says is `recycle.exec.checkpoint`'s to know, which reads it into a type; here is how it vouches for
itself, and the folder of what came with a model from Hugging Face.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from recycle.errors import JobError, RecycleError
from recycle.files import read_whole

FORMAT, VERSION = "recycle-checkpoint", 1
MANIFEST = "manifest.json"
MODEL = "[model]"
"""Key of a manifest's identity: the `[model]` section that the weights belong to."""
HUGGING_FACE = "huggingface"
"""Folder, in a checkpoint or beside a run's checkpoints, of the files that came with the weights."""
_MOST_BYTES = 2**26


class Damaged(RecycleError):
    """A checkpoint that is not complete; says what is wrong with it."""


def digest(content: Any) -> str:
    """sha256 that a manifest states of itself."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def manifest_text(content: Any) -> str:
    """The text of a manifest's file."""
    return json.dumps({"sha256": digest(content), "manifest": content}, indent=1)


def manifest_content(folder: Path) -> dict[str, Any]:
    """The content of the manifest in a checkpoint's folder, checked against its own hash.

    Raises:
        Damaged: it is missing or not what was written.
        JobError: it is of a newer version.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise Damaged(f"{folder}: incomplete, it has no {MANIFEST}")
    try:
        parsed = json.loads(read_whole(path, Damaged, _MOST_BYTES))
        content: dict[str, Any] = parsed["manifest"]
        if content["format"] != FORMAT or digest(content) != parsed["sha256"]:
            raise Damaged(f"{path}: damaged, it is not what was written")
        if content["version"] > VERSION:
            raise JobError(f"{path}: of version {content['version']}, this recycle reads up to {VERSION}; update it")
        return content
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"{path}: damaged, it is not what was written") from None


def require_checkpoint(folder: Path) -> None:
    """Raise JobError unless a folder has the manifest of a checkpoint."""
    if not (folder / MANIFEST).is_file():
        inside = sorted(folder.glob("checkpoints/step-*")) or sorted(folder.glob("step-*"))
        hint = f"; take one of its checkpoints, such as {inside[-1]}" if inside else ""
        raise JobError(f"{folder}: is no checkpoint, it has no {MANIFEST}{hint}")


def carried_files(checkpoint: Path) -> Path | None:
    """The folder of the files that came with a checkpoint's weights, or with those that its run began with."""
    return next((found for at in (checkpoint, checkpoint.parent) if (found := at / HUGGING_FACE).is_dir()), None)
