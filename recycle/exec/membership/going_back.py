"""Going back to a state that all agreed on and have kept: the record of a generation that does, and what differed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from recycle.exec.checksums import StateTensor, described
from recycle.exec.leader.disagreement import Bit
from recycle.exec.members import members_of
from recycle.exec.protocol import GenerationRecord, Verified
from recycle.shape import Worker


def kept_by(verified: Verified | None, live: Collection[Worker], joined: Collection[Worker]) -> Verified | None:
    """The state to go back to, as the record of the next generation names it: who joins does not have it either.

    Args:
        verified: as the last record names it.
        live: all workers of the next generation. joined: those that join with it.
    """
    if verified is None:
        return None
    without = {*verified.without, *map(str, joined)}
    return msgspec.structs.replace(verified, without=[str(w) for w in sorted(live) if str(w) in without])


def gone_back(
    record: GenerationRecord, verified: Verified, live: Collection[Worker], joined: Collection[Worker]
) -> GenerationRecord:
    """The record of a generation that is over from the start, behind which all go on from the verified state.

    It says nothing of the steps after that state: they are run, evaluated and kept again.

    Args:
        record: the last one.
        live: the workers that are left. joined: those that have not kept the state, and copy it.
    """
    names, evaluated = [str(worker) for worker in sorted(live)], record.evaluated
    if evaluated is not None and evaluated.step > verified.step:
        evaluated = None
    return msgspec.structs.replace(
        record,
        generation=record.generation + 1,
        live=names,
        roles={name: name for name in names},
        committed=verified.step,
        commit=verified.commit,
        joins=[str(worker) for worker in sorted(joined)],
        mode="barrier",
        evaluated=evaluated,
        copies=[],
        behind=[],
        held=verified.holds,
        holds=verified.holds,
        candidate=None,
        disputed=[],
    )


def named_bits(
    bits: Sequence[Bit], layout: Callable[[int, int], Sequence[Sequence[Any]]], tensor_parallel: int
) -> list[dict[str, Any]]:
    """Bits of states by the names of their tensors.

    Args:
        layout: of a stage and a tensor rank, what its hosts have told of their tensors; empty where none has.
    """
    named = []
    for one in bits:
        found = described(one.place, [StateTensor(*tensor) for tensor in layout(one.stage, one.tensor_rank)])
        if found is not None:
            tensor, index, bit = found
            whose = members_of([one.worker], tensor_parallel)[one.tensor_rank]
            named.append({"worker": whose, "stage": one.stage, "tensor": tensor, "index": index, "bit": bit})
    return named
