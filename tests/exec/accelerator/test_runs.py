"""Training over the simulated accelerator, through faults: losses and states are those of the calm run over gloo."""

from __future__ import annotations

import pytest

from recycle import Job
from recycle.exec.launch.launcher import RunResult
from tests.exec.accelerator.transport import SIMULATED
from tests.exec.runs import Run, job, kinds

pytestmark = pytest.mark.process

STEPS = 9
_CALM: dict[str, RunResult] = {}


def over(transport: str, kind: str = "emulated", **sections: dict) -> Job:
    """3 x 2 workers."""
    membership = {"transport": transport, "heartbeat": 0.1, "dead_after": 2.0} | sections.pop("membership", {})
    return job(3, 2, 2, kind=kind, train={"clip": 1e9, "warmup": 2}, membership=membership, **sections)


def calm(launch: Run, kind: str, steps: int) -> RunResult:
    """The run over gloo that nothing happens to, once per kind and length."""
    key = f"{kind} {steps}"
    if key not in _CALM:
        _CALM[key] = launch(over("gloo", kind), steps)
    return _CALM[key]


def assert_same_training(run: RunResult, reference: RunResult) -> None:
    """Losses, norms and every final state, to the last bit."""
    assert run.losses == reference.losses
    assert [line["grad_norm"] for line in run.metrics] == [line["grad_norm"] for line in reference.metrics]
    assert run.digests
    assert run.digests == {worker: reference.digests[worker] for worker in run.digests}


@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_a_kill_and_a_rejoin_change_no_bit(kind: str, launch: Run) -> None:
    run = launch(over(SIMULATED, kind), STEPS, "kill:1.1@3", "rejoin:1.1@6")
    assert_same_training(run, calm(launch, kind, STEPS))
    assert kinds(run).count("detected") == 1
    assert run.metrics[-1]["live_workers"] == 6
