"""Who writes which part of a checkpoint, and how it says that it has."""

from __future__ import annotations

from msgspec import Struct

from recycle.exec.checkpoint.checkpoint import StoredFile
from recycle.exec.membership.members import member_name
from recycle.exec.membership.messages import GenerationRecord
from recycle.shape import Worker


class Saved(Struct, frozen=True):
    """What a process posts as `saved/<n>/<stage>`: the files that it wrote, or why it could not."""

    files: dict[str, StoredFile] = {}
    error: str = ""


def saved_key(step: int, stage: int, tensor_rank: int = 0) -> str:
    """Key of the store under which what a tensor rank holds of a stage is announced as written."""
    return f"saved/{step}/{member_name(str(stage), tensor_rank)}"


def writer_of(stage: int, rank: int, record: GenerationRecord) -> str:
    """The worker that writes a stage: one that hosts it since before this generation; another pipeline's per stage.

    Args:
        rank: whose workers host the stage.
    """
    ranks = {name: Worker.parse(role).rank for name, role in record.roles.items() if name not in record.joins}
    hosts = sorted(name for name, of in ranks.items() if of == rank)
    return hosts[stage % len(hosts)]
