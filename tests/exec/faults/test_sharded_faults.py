"""Faults in every phase of a run whose optimizer state is sharded, its gathers among them: no bit changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recycle.errors import JobError
from recycle.exec.faults.kinds import KINDS
from recycle.exec.launch.launcher import RunResult
from tests.exec.fault_matrix import ENDING, JOB, SHARDED_COLUMNS, STEPS, matrix_row, phases
from tests.exec.runs import Run, calm_run
from tests.exec.sharded import bits, sharded

PARTS = sharded(JOB)


@pytest.fixture
def reference(launch: Run) -> RunResult:
    """The run without faults, which has the losses and norms of hosts that have all of the state."""
    calm = calm_run(PARTS, launch, STEPS)
    assert bits(calm) == bits(calm_run(JOB, launch, STEPS))
    return calm


@pytest.mark.parametrize(
    ("name", "struck"),
    [
        ("kill", ["reduce", "step", "gather", "undo", "copy"]),
        *(pytest.param(name, phases(KINDS[name], SHARDED_COLUMNS), marks=pytest.mark.soak) for name in ENDING),
    ],
)
def test_a_kind_is_found_in_its_phases_and_changes_no_bit(
    name: str, struck: Sequence[str], launch: Run, reference: RunResult
) -> None:
    row = matrix_row(name, struck, lambda faults: launch(PARTS, STEPS, *faults), reference)
    assert row[-1] == "identical"


def test_nothing_is_gathered_where_every_host_has_all(launch: Run) -> None:
    with pytest.raises(JobError, match=r"kill:1.1@1.gather: nothing is gathered without \[train\] sharded_optimizer"):
        launch(JOB, 2, "kill:1.1@1.gather")
