"""Who holds which shards, in one line of text: what the record of a generation says of it.

Who is to own a shard follows from who is alive (shards.py), and in the end its owners hold it. Between a death and the
last copy that it calls for some of them hold less, and somebody else may hold more. The text names who is dead, and of
the others what differs: `shards -1.1 ~2.1:5 +0.1:7` says that 1.1 is dead, that 2.1 does not hold shard 5, which it is
to own, and that 0.1 holds shard 7, which it is not to own. Where layers have moved it says by which plan the workers
host them: `shards @0123456789abcdef -1.1`.
"""

from __future__ import annotations

from collections.abc import Collection

from recycle.errors import RunError
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts
from recycle.plans.shards import ShardHosts, StageShards

_NAME = "shards"
_PLAN, _DEAD, LACKS, _HAS_BESIDES = "@", "-", "~", "+"


def text_of(shards: StageShards, workers: Collection[Worker], held: Hosts, plan: str = "") -> str:
    """The text of what live workers hold.

    Args:
        workers: of the run, dead ones too.
        held: by the live ones.
        plan: hash of that by which the workers host what they do; empty for what processes start with.
    """
    live = [worker for worker in sorted(workers) if worker in held.units]
    owned = shards.owned(live).stages
    words = [_NAME, *([f"{_PLAN}{plan}"] if plan else [])]
    words += [f"{_DEAD}{worker}" for worker in sorted(workers) if worker not in held.units]
    for worker in live:
        wanted, there = set(owned[worker]), set(held.stages[worker])
        words += [f"{LACKS}{worker}:{number}" for number in sorted(wanted - there)]
        words += [f"{_HAS_BESIDES}{worker}:{number}" for number in sorted(there - wanted)]
    return " ".join(words)


def plan_of(text: str) -> str:
    """Hash of the plan that a text names; empty where it names none."""
    return next((word[1:] for word in text.split(" ") if word[:1] == _PLAN), "")


def held_by(shards: StageShards, workers: Collection[Worker], text: str) -> ShardHosts:
    """What live workers hold by a text, given the shards of its plan. Raises RunError where it is none."""
    name, *words = text.split(" ")
    if name != _NAME:
        raise RunError(f"the register says {text!r} of who holds which shard; it is of a run without them")
    dead = {Worker.parse(word[1:]) for word in words if word[0] == _DEAD}
    live = [worker for worker in workers if worker not in dead]
    found = {worker: set(numbers) for worker, numbers in shards.owned(live).stages.items()}
    for word in words:
        if word[0] in (LACKS, _HAS_BESIDES):
            worker, number = word[1:].split(":")
            (found[Worker.parse(worker)].discard if word[0] == LACKS else found[Worker.parse(worker)].add)(int(number))
    return shards.as_hosts({worker: sorted(numbers) for worker, numbers in found.items()})
