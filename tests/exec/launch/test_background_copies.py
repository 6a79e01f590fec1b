"""Copies of shards that are made while training goes on, in pieces over several iterations, and deaths meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import pytest

from recycle.errors import JobError
from recycle.exec.launch.launcher import RunResult
from recycle.job import Job, PricedJob
from tests.exec.runs import Run, calm_run, figures, job, kinds
from tests.exec.sharded import require_equal, sharded, stored

STEPS = 14
PIECE = 49152
"""Bytes of a piece: a shard of the models here takes several iterations."""
pytestmark = [pytest.mark.process, pytest.mark.slow]


@cache
def gpt(pipelines: int, precision: str) -> PricedJob:
    train = {"clip": 1e9, "checkpoint_every": STEPS, "precision": precision}
    limits = {"heartbeat": 0.1, "dead_after": 3.0}
    return job(pipelines, 1, 2, kind="gpt", train=train, model={"hidden": 64, "layers": 1}, membership=limits)


def in_pieces(of: PricedJob, copies: int) -> PricedJob:
    parts = sharded(of, copies)
    return parts.with_sections(train=msgspec.structs.replace(parts.train, copy_bytes=PIECE))


def require_same(found: RunResult, of: PricedJob, launch: Run) -> None:
    wanted = calm_run(of, launch, STEPS)
    assert figures(found) == figures(wanted)
    assert "restored" not in kinds(found)
    assert found.directory is not None
    assert wanted.directory is not None
    folder = f"checkpoints/step-{STEPS - 1:08d}"
    require_equal(stored(Path(found.directory) / folder), stored(Path(wanted.directory) / folder))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copies_come_in_pieces_and_then_the_stage_bears_another_death(precision: str, launch: Run) -> None:
    of = gpt(3, precision)
    found = launch(in_pieces(of, 2), STEPS, "kill:1.0@1.forward", "kill:0.0@12.step")
    require_same(found, of, launch)
    told = [(event["step"], event["further_deaths"]) for event in found.events if event["kind"] == "shards"]
    assert [deaths for _, deaths in told] == [[1], [0], [1], [0]]
    moved = [event for event in found.events if event["kind"] == "moved" and event["step"] < 12]
    assert {(event["worker"], event["source"]) for event in moved} == {("0.0", "2.0"), ("2.0", "0.0")}
    assert all(event["while_running"] for event in moved)
    pieces = max(event["bytes"] for event in moved) / PIECE
    assert pieces > 3
    restored = told[2][0]
    assert 1 + int(pieces) <= restored < 12


@pytest.mark.parametrize(
    "faults",
    [
        ("kill:1.0@1", "kill:2.0@3.copy"),
        *(
            pytest.param(each, marks=pytest.mark.soak)
            for each in (
                ("kill:1.0@1", "kill:3.0@3.copy"),
                ("kill:1.0@1", "kill:0.0@4.copy"),
                ("kill:1.0@1", "kill:2.0@3.step"),
                ("kill:1.0@1", "kill:3.0@3.gather"),
                ("kill:1.0@1", "stop:0.0@2.reduce"),
                ("kill:1.0@1", "rejoin:1.0@3"),
                ("kill:1.0@1", "rejoin:1.0@3", "kill:0.0@4", "kill:2.0@6.copy"),
                ("kill:1.0@1", "nan:0.0@3"),
                ("kill:1.0@1", "kill:2.0@2.copy", "rejoin:2.0@6", "rejoin:1.0@8", "kill:3.0@9"),
            )
        ),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.soak)])
def test_a_death_of_either_end_has_the_copy_begin_anew_and_changes_no_bit(
    precision: str, faults: Sequence[str], launch: Run
) -> None:
    of = gpt(4, precision)
    found = launch(in_pieces(of, 3), STEPS, *faults)
    require_same(found, of, launch)
    told = [event["further_deaths"] for event in found.events if event["kind"] == "shards"]
    assert told[0] == [2]
    assert told[1] == [1]


def test_a_limit_without_shards_is_refused_in_one_line() -> None:
    with pytest.raises(JobError, match=r"\[train\] copy_bytes: needs sharded_optimizer = true"):
        Job.from_toml("[shape]\npipelines = 3\nranks = 2\nmicro_batches = 2\n[train]\ncopy_bytes = 4096")
