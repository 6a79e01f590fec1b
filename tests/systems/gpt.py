"""A tiny GPT in one process: what a schedule of a system leaves behind, and what fault-free 1F1B does."""

from __future__ import annotations

from recycle import Job, Schedule
from recycle.exec import run
from recycle.exec.launch.launcher import RunResult
from recycle.ir.families import one_f_one_b
from tests.exec.runs import job

STEPS = 3


def gpt(pipelines: int, ranks: int, micro_batches: int, split: list[int], chunks: int = 1) -> Job:
    """The job of a GPT with so many layers per stage; all with as many layers and micro-batches in all, and the same
    seed, train the same model on the same data."""
    return job(
        pipelines,
        ranks,
        micro_batches,
        kind="gpt",
        shape={"chunks": chunks},
        memory={"limit": 64},
        model={"layers": sum(split), "split": split},
    )


def reference(of: Job) -> RunResult:
    """One worker per stage and pipeline, all alive."""
    return run(one_f_one_b(of.shape), of, steps=STEPS)


def assert_same_bits(schedule: Schedule, of: Job, expected: RunResult) -> RunResult:
    """Run the schedule; losses, gradient norms and the state of every stage must be those of `expected`."""
    result = run(schedule, of, steps=STEPS)
    assert result.losses == expected.losses
    assert [m["grad_norm"] for m in result.metrics] == [m["grad_norm"] for m in expected.metrics]
    return result


def states(result: RunResult) -> dict[int, str]:
    """Digest of each stage's parameters and optimizer state, which all of its hosts agree on."""
    found: dict[int, set[str]] = {}
    for stages in result.digests.values():
        for stage, digest in stages.items():
            found.setdefault(stage, set()).add(digest)
    assert all(len(digests) == 1 for digests in found.values())
    return {stage: digests.pop() for stage, digests in sorted(found.items())}
