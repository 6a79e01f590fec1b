"""Who writes which part of a checkpoint."""

from __future__ import annotations

from recycle.exec.membership.messages import GenerationRecord
from recycle.shape import Worker


def writer_of(stage: int, rank: int, record: GenerationRecord) -> str:
    """The worker that writes a stage: one that hosts it since before this generation; another pipeline's per stage.

    Args:
        rank: whose workers host the stage.
    """
    ranks = {name: Worker.parse(role).rank for name, role in record.roles.items() if name not in record.joins}
    hosts = sorted(name for name, of in ranks.items() if of == rank)
    return hosts[stage % len(hosts)]
