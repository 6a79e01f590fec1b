"""Schedules with replays run: the same losses and bits as without, and what differs is told with who holds what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recycle import RunError
from recycle.exec import run
from recycle.exec.data.batches import Batch
from recycle.exec.emulation import EmulatedStage
from recycle.exec.model.loss import masked_sum
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.replays import with_replays
from recycle.job.sections import IntegritySection
from tests.exec.runs import job


@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_losses_and_states_are_those_of_the_schedule_without_replays(kind: str) -> None:
    of = job(3, 2, 2, kind=kind)
    for family in (one_f_one_b, zb_h1):
        schedule = family(of.shape)
        with_them, without = (run(one, of, steps=2) for one in (with_replays(schedule).whole, schedule))
        assert with_them.losses == without.losses
        assert with_them.digests == without.digests


@pytest.mark.parametrize(("every", "is_sharded"), [(3, False), ("gaps", False), (3, True)])
def test_all_workers_of_one_process_replay_in_turn(every: int | str, is_sharded: bool) -> None:
    of = job(3, 2, 2, kind="gpt", train={"checkpoint_every": 0, "sharded_optimizer": is_sharded})
    compared = of.with_sections(integrity=IntegritySection(every=every))
    schedule = one_f_one_b(of.shape)
    with_them, without = (run(schedule, one, steps=4) for one in (compared, of))
    assert with_them.losses == without.losses
    assert with_them.digests == without.digests


@pytest.mark.parametrize(("is_sharded", "part"), [(False, "stage 0"), (True, "shard 0 of stage 0")])
@pytest.mark.parametrize("integrity", [{"digests": 2}, {"every": 4, "digests": 2}])
def test_of_one_process_states_that_differ_end_the_run(
    is_sharded: bool, part: str, integrity: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of all leaves another parameter; the state that iteration 2 begins with is compared."""
    train = {"checkpoint_every": 0, "sharded_optimizer": is_sharded}
    of = job(2, 1, 4, train=train, integrity=integrity)
    step, struck = EmulatedStage._update, list[int]()

    def update(stage: EmulatedStage, parameters: torch.Tensor, *rest: Any) -> None:
        step(stage, parameters, *rest)
        parameters[0] += not struck
        struck.append(1)

    monkeypatch.setattr(EmulatedStage, "_update", update)
    with pytest.raises(RunError, match=rf"step 2: workers 0.0 and 1.0 hold different states of {part}"):
        run(one_f_one_b(of.shape), of, steps=4)


def test_of_one_process_what_differs_ends_the_run_when_it_has_its_turn() -> None:
    """From the 13th call on the loss is not what it was when a micro-batch is replayed."""
    of = job(2, 1, 4, kind="gpt", train={"checkpoint_every": 0}, integrity={"every": 4})
    calls = []

    def loss(losses: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, object]:
        calls.append(1)
        total, count = masked_sum(losses, batch)
        return total + len(calls) * (len(calls) > 12), count

    with pytest.raises(RunError, match=r"step 1: workers .* made different things of micro-batch .* computes wrong"):
        run(one_f_one_b(of.shape), of, steps=4, loss=loss)
