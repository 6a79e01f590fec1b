"""The final states of a run: what each worker that still lives says of its own after the last commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from recycle.exec.members import joined_digests, members_of
from recycle.exec.membership import schema
from recycle.exec.membership.interfaces import Log, Processes
from recycle.exec.membership.store import Store
from recycle.shape import Worker


def final_digests(
    live: set[Worker],
    store: Store,
    processes: Processes,
    tensor_parallel: int,
    lost: Callable[[Collection[str]], Mapping[Worker, str]],
    log: Log,
    step: int,
) -> dict[str, dict[int, str]] | None:
    """Worker -> stage -> sha256 of the stage's final state, once every worker that still lives has left them; None
    before. A worker that dies or hangs meanwhile is detected as ever, without consequence.

    Args:
        live: the workers; whoever is gone before it has left its own is taken out.
        tensor_parallel: processes of each worker.
        lost: given the processes that have left theirs, whoever else is dead or hangs, with why.
        log: takes the events.
        step: the last iteration.
    """
    gone = processes.gone()  # before the digests are read, because a process leaves its digest and then ends
    if gone:
        store.set(schema.OverKey(), True)  # after this write, this client reads what others wrote before
    final = store.answers(schema.FinalKey(schema.EVERYBODY), members_of(live, tensor_parallel))
    gone |= lost(final)
    waits = {worker for worker in live if not final.keys() >= set(members_of([worker], tensor_parallel))}
    for worker in sorted(waits & gone.keys()):
        processes.kill(worker)
        live.discard(worker)
        log("detected", worker=str(worker), step=step, cause=gone[worker], over=True)
    if waits - gone.keys():
        return None
    of_members = {worker: [final[name] for name in members_of([worker], tensor_parallel)] for worker in sorted(live)}
    return {str(worker): joined_digests(parts) for worker, parts in of_members.items()}
