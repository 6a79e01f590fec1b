"""Checkpoints on disk: contents of a folder, its verification, reading and writing.

    checkpoints/step-00000012/
        stage-0000-1-of-1.safetensors    a stage's parameters, AdamW moments and step counts, by name in the whole model
        stage-0001-1-of-1.safetensors
        manifest.json                    written last: the commit, the model, and every file's size and sha256

A checkpoint is valid only if its manifest is complete and every file matches it; otherwise the previous one is used.
Files are in the safetensors format, which cannot execute code when loaded.
Names do not depend on the split into stages, so the model can be loaded in any other shape.

A sharded optimizer has files of shards instead of stages, with parts of parameters as `NAME.elements-FIRST-END`. With
tensor parallelism T each rank writes its T-th along one dimension, as `NAME.tensor-t-of-T` into `stage-0000tT-…`; rank
0 also writes replicated tensors. Any other sharding and T can read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from safetensors import SafetensorError

from recycle.errors import RunError, first_line
from recycle.exec.members import member_name
from recycle.exec.model.stored_tensors import StoredTensors, piece_of, shape_told, with_part
from recycle.exec.protocol import Commit, StoredFile
from recycle.files import create_beside, sync
from recycle.job import Job
from recycle.job.manifest import FORMAT, MANIFEST, MODEL, VERSION, Damaged, manifest_content, manifest_text
from recycle.job.sections import ModelSection, TrainSection
from recycle.plans.hosting import layers_of

if TYPE_CHECKING:  # the agent finds and completes checkpoints without torch
    import torch

    from recycle.exec.model.stage import Stage

PART_BYTES = 1 << 27
"""Size of the files into which a stage is split; one file at a time is serialized in memory."""
_FOLDER = re.compile(r"step-(\d{8,})")
SUFFIX = ".safetensors"


class Manifest(Struct, frozen=True, rename={"commit": "facts"}):
    """Manifest of a checkpoint.

    Attributes:
        commit: of that iteration; `facts` in the file.
        identity: settings that must match for the state to fit; see `identity`.
        course: further settings that the next losses depend on; see `course`.
        files: name -> size and hash.
    """

    step: int
    commit: Commit
    shape: dict[str, int]
    identity: dict[str, Any]
    course: dict[str, Any]
    files: dict[str, StoredFile]
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    manifest: Manifest


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def identity(job: Job) -> dict[str, Any]:
    """Settings that a run and a checkpoint must share: the model, in any split, the batch, and other optimizers."""
    kept = model_identity(job.model)
    if job.model.kind == "emulated":
        kept = {"kind": "emulated", "layers": sum(layers_of(job)), "seed": job.model.seed}
    optimizers = job.train.optimizers()
    return ({} if set(optimizers.values()) == {"adamw"} else optimizers) | {
        MODEL: kept,
        "micro-batches per iteration (D*m)": job.shape.global_micro_batches,
        "[data] micro_batch_size": job.data.micro_batch_size,
        "[train] precision": job.train.precision,
    }


def model_identity(model: ModelSection) -> dict[str, Any]:
    """The keys of `[model]` that determine the weights."""
    changes_nothing = ("split", "seconds_per_unit", "recompute", "import_from", "weights")
    kept = {key: value for key, value in msgspec.to_builtins(model).items() if key not in changes_nothing}
    kept["config"].pop("transformer_impl", None)
    return kept


def course(job: Job, text_digest: str | None) -> dict[str, Any]:
    """Further settings that the next losses depend on: the optimizer, the learning rate schedule, the text."""
    train = msgspec.to_builtins(job.train)
    held = ("sharded_optimizer", "optimizer_copies", "copy_bytes")
    changes_nothing = ("checkpoint_every", "checkpoint_keep", "checkpoint_deadline", "trace", *held)
    defaults = msgspec.to_builtins(TrainSection())
    for key in ("per_token_loss", "optimizer", "groups", "momentum", "rampup_batch_size"):
        if train[key] == defaults[key]:
            del train[key]  # checkpoints of versions without this key stay comparable
    keys = {f"[train] {key}": value for key, value in train.items() if key not in changes_nothing}
    return keys | {"[data] seed": job.data.seed, "[data] text": text_digest}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """A text "key is ours, there theirs" for every key that differs, including nested ones."""
    texts = []
    for key in {**theirs, **ours}:
        own, other = ours.get(key), theirs.get(key)
        if isinstance(own, dict) and isinstance(other, dict):
            texts += [f"{key} {inner}" for inner in differences(own, other)]
        elif own != other:
            texts.append(f"{key} is {own}, there {other}")
    return texts


def stored_names(
    named: Mapping[str, torch.Tensor], cuts: Mapping[str, int | None], tensor: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """State of a stage that a tensor rank writes, by name in the checkpoint."""
    rank, size = tensor
    tensors: dict[str, torch.Tensor] = {}
    for name, value in named.items():
        whole = (piece_of(name) or (name,))[0]
        if whole in cuts or rank == 0:
            is_part = size > 1 and cuts.get(whole) is not None
            tensors[with_part(name, rank, size) if is_part else name] = value
    return tensors


def write_stage(
    folder: Path, stage: int, writer: str, named: dict[str, torch.Tensor], tensor_rank: int = 0, kind: str = "stage"
) -> dict[str, StoredFile]:
    """Write a stage's state into a checkpoint's folder, and return size and hash of each file.

    Each file is moved into place when complete; concurrent writers of the same stage do not interfere. Raises RunError.

    Args:
        named: CPU tensors by their name in the checkpoint, which must not change meanwhile.
        kind: "stage", or "shard" of a sharded optimizer, with number `stage`.
    """
    stored: dict[str, StoredFile] = {}
    if not named:
        return stored
    label = member_name(f"{stage:04d}", tensor_rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{kind}-{stage}-{writer}.") as scratch:
            written: list[Path] = []
            for part in _parts(named):
                written.append(Path(scratch) / str(len(written)))
                save_tensors(written[-1], part, folder)
            for number, (path, digest) in enumerate(zip(written, hashes(written), strict=True), start=1):
                name = f"{kind}-{label}-{number}-of-{len(written)}{SUFFIX}"
                stored[name] = StoredFile(path.stat().st_size, digest)
                os.replace(path, folder / name)
        sync(folder)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{folder}: {first_line(error)}") from None
    return stored


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a safetensors file to disk, as readable as a folder. Raises SafetensorError, OSError."""
    from safetensors.torch import save_file

    save_file(tensors, path, {"format": "pt"})
    os.chmod(path, folder.stat().st_mode & 0o666)  # safetensors makes files readable by their owner only
    sync(path)


def _parts(named: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    parts: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in named.items():
        if filled and filled + tensor.nbytes > PART_BYTES:
            parts.append({})
            filled = 0
        # Parameters share their step count, which safetensors refuses.
        parts[-1][name] = tensor.clone() if tensor.numel() == 1 else tensor
        filled += tensor.nbytes
    return parts


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Complete the checkpoint. Raises OSError, and then the checkpoint is incomplete."""
    content = msgspec.to_builtins(manifest, str_keys=True)
    temporary, descriptor = create_beside(folder / MANIFEST)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(manifest_text(content))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, folder / MANIFEST)
    sync(folder)
    sync(folder.parent)


def write_untrained(folder: Path, model: ModelSection, files: Mapping[str, StoredFile]) -> None:
    """Complete a checkpoint of untrained weights. Raises OSError, and then the checkpoint is incomplete."""
    before = Commit(step=-1, loss=0.0, grad_norm=0.0, clip_factor=None)
    write_manifest(folder, Manifest(-1, before, {}, {MODEL: model_identity(model)}, {}, dict(files)))


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises Damaged, or JobError for a newer version."""
    try:
        return msgspec.convert(manifest_content(folder), Manifest, str_keys=True)
    except msgspec.ValidationError:
        raise Damaged(f"{folder / MANIFEST}: damaged, it is not what was written") from None


def verify(folder: Path) -> Checkpoint:
    """Verify every byte of a run's checkpoint. Raises Damaged, or JobError for a newer version."""
    checkpoint = verify_files(folder)
    if folder_of(folder.parent, checkpoint.manifest.step) != folder:
        raise Damaged(f"{folder}: damaged, its manifest is of step {checkpoint.manifest.step}")
    return checkpoint


def verify_files(folder: Path) -> Checkpoint:
    """As `verify`, for any folder name: an imported checkpoint, or one copied from a run."""
    manifest = read_manifest(folder)
    try:
        present = {path.name for path in folder.iterdir() if path.suffix == SUFFIX}
        for name in sorted(manifest.files.keys() | present):
            path, stored = folder / name, manifest.files.get(name)
            if stored is None:
                raise Damaged(f"{path}: damaged, the manifest does not name this file")
            if name not in present or not path.is_file():
                raise Damaged(f"{path}: missing")
            if path.stat().st_size != stored.bytes:
                raise Damaged(f"{path}: cut off, {path.stat().st_size} bytes of {stored.bytes}")
        names = sorted(manifest.files)
        for name, digest in zip(names, hashes([folder / name for name in names]), strict=True):
            if digest != manifest.files[name].sha256:
                raise Damaged(f"{folder / name}: damaged, its content is not what was written")
    except OSError as error:
        raise Damaged(f"{folder}: cannot be read ({error.strerror})") from None
    return Checkpoint(folder, manifest)


def folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint below `root`, complete or not, the newest first."""
    checkpoints = []
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            match = _FOLDER.fullmatch(path.name)
            if match is not None and path.is_dir():
                checkpoints.append((int(match[1]), path))
    return sorted(checkpoints, reverse=True)


def newest(
    root: Path, warn: Callable[[str], object], upto: int | None = None, since: str = "metrics.jsonl is whole"
) -> Checkpoint | None:
    """The newest complete checkpoint, up to step `upto`; calls `warn` for each that is skipped.

    Raises JobError if the newest is from a newer version.
    """
    for step, folder in folders(root):
        if upto is not None and step > upto:
            warn(f"{folder}: skipped, because {since} up to step {upto} only")
            continue
        try:
            return verify(folder)
        except Damaged as error:
            warn(f"skipped: {error}")
    return None


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a partly removed checkpoint is not valid."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def load(folder: Path, stages: Iterable[Stage], tensor_rank: int = 0, tensor_parallel: int = 1) -> None:
    """Copy a checkpoint of any split and any T into the live state of `stages`. Raises RunError."""

    try:
        stored = StoredTensors(sorted(folder.glob(f"*{SUFFIX}")), RunError)
        for stage in stages:
            cuts = stage.cuts()
            for name, live in stage.named_state(stage.state_tensors()).items():
                whole, begin, end = piece_of(name) or (name, 0, live.numel())
                shape = shape_told(name) or tuple(live.shape)
                part = stored.part(whole, cuts.get(whole), tensor_rank, tensor_parallel, shape)
                if whole == name and part.shape not in (live.shape, (live.numel(),)):
                    raise RunError(f"{whole} has {part.numel()} elements, but shape {list(live.shape)} in the model")
                live.copy_(part.reshape(-1)[begin:end].view(live.shape))
    except (RunError, RuntimeError, ValueError) as error:
        raise RunError(f"{folder}: cannot be loaded: {first_line(error)}") from None


def hashes(paths: Sequence[Path]) -> list[str]:
    """sha256 of files, hashed in parallel threads. Raises OSError for the first unreadable file."""
    with ThreadPoolExecutor(max(1, min(len(paths), os.cpu_count() or 1)), thread_name_prefix="hash") as threads:
        try:
            return list(threads.map(_sha256, paths))
        except OSError:
            threads.shutdown(cancel_futures=True)
            raise


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
