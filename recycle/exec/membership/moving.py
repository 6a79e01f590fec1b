"""What is told of the copies of a generation that begins to run: who has joined, and which layers have moved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from recycle.exec.leader.holdings import Holdings
from recycle.exec.membership.interfaces import Log
from recycle.exec.protocol import Copied
from recycle.shape import Worker


def log_copies(
    log: Log,
    step: int,
    copied: Sequence[tuple[str, Copied]],
    joined: Collection[Worker],
    holdings: Holdings,
    while_running: bool = False,
) -> None:
    """Write an event for each worker that has joined, and one for what a worker has copied besides.

    Args:
        step: the first iteration of the generation.
        copied: who has copied what.
        joined: the workers that held nothing before.
        holdings: of the run.
        while_running: copied while the generation runs, which nobody has waited for.
    """
    for worker in sorted(joined):
        mine = [one for name, one in copied if name == str(worker)]
        sources = dict.fromkeys(one.source for one in mine)
        log(
            "rejoined",
            worker=str(worker),
            step=step,
            copied_from=" ".join(sources),
            bytes=sum(one.bytes for one in mine),
            seconds=round(sum(one.seconds for one in mine), 6),
        )
    for name, source, several in _in_lines(copied, holdings):
        if Worker.parse(name) not in joined:
            log(
                "moved",
                worker=name,
                step=step,
                **holdings.event_fields([(one.first, one.last) for one in several]),
                source=source,
                bytes=sum(one.bytes for one in several),
                seconds=round(sum(one.seconds for one in several), 6),
                **({"while_running": True} if while_running else {}),
            )


def _in_lines(copied: Sequence[tuple[str, Copied]], holdings: Holdings) -> Iterator[tuple[str, str, Sequence[Copied]]]:
    """Worker, source, and what one event tells of: layers by their range, shards all that come from one source."""
    if not holdings.are_logged_together:
        yield from ((name, one.source, [one]) for name, one in copied)
        return
    pairs: dict[tuple[str, str], list[Copied]] = {}
    for name, one in copied:
        pairs.setdefault((name, one.source), []).append(one)
    yield from ((name, source, several) for (name, source), several in pairs.items())
