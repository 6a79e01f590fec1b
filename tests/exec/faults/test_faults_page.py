"""The tables of docs/reference/faults.md state what each kind of fault does to a run; each is struck here."""

import re

import pytest

from recycle.exec.faults.kinds import BETWEEN, KINDS, PHASES
from tests.exec.fault_matrix import (
    COLUMNS,
    ENDING,
    JOB,
    MATRIX_HEAD,
    PAGE,
    SCENARIO_HEAD,
    STEPS,
    limit,
    matrix_row,
    phases,
    scenario_rows,
    steps_for,
)
from tests.exec.runs import assert_same_training, calm_run, live_workers

KIND_HEAD = ["kind", "example", "does", "detected by", "seconds at most", "then", "losses"]
LIMITS = {
    "stop": "`dead_after` + `heartbeat`",
    "hang": "`dead_after` + `heartbeat`",
    "stall": "`hung_after` + 2 `heartbeat`",
    "cut": "`dead_after` + 1",
    "nan": "the end of the iteration",
    "flip": "the end of the iteration",
    "rejoin": "–",
    "drain": "–",
    "slow": "–",
    "slow-link": "–",
    "flaky-link": "–",
}


def written(head: list[str]) -> list[list[str]]:
    """The rows of the page's table with this head, cell by cell."""
    after = PAGE.read_text().split("| " + " | ".join(head) + " |\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in after.splitlines()[1:]]


def without_seconds(cells: list[str]) -> list[str]:
    return [re.sub(r"^[0-9]+\.[0-9]{2}$", "seconds", cell) for cell in cells]


@pytest.mark.parametrize(
    ("name", "struck"),
    [  # test_struck_runs.py and the tests of accelerators and evaluations have kills in the other phases
        ("kill", ["forward", "backward", "commit", "stepped", "acknowledge"]),
        *(pytest.param(name, phases(KINDS[name]), marks=pytest.mark.soak) for name in ENDING),
    ],
)
def test_kind_of_fault_has_the_effects_of_its_row(name, struck, launch):
    steps = steps_for(struck)
    cells = matrix_row(name, struck, lambda faults: launch(JOB, steps, *faults), calm_run(JOB, launch, steps))
    row = dict(zip(MATRIX_HEAD, without_seconds(cells), strict=True))
    (on_page,) = (cells for cells in written(MATRIX_HEAD) if cells[0] == f"`{name}`")
    says = dict(zip(MATRIX_HEAD, without_seconds(on_page), strict=True))
    assert {head: says[head] for head in ("kind", *struck, "losses")} == {
        head: row[head] for head in ("kind", *struck, "losses")
    }, "docs/reference/faults.md is out of date; run: make faults"
    assert all(float(cell) <= limit(name) for cell in on_page[1:-1] if cell != "–")


@pytest.mark.soak
def test_combined_faults_have_the_effects_of_the_page(launch):
    rows = scenario_rows(lambda faults: launch(JOB, STEPS, *faults), calm_run(JOB, launch, STEPS))
    assert [without_seconds(row) for row in written(SCENARIO_HEAD)] == list(map(without_seconds, rows)), (
        "run: make faults"
    )


def test_faults_that_end_no_worker_change_no_bit(launch):
    steps = 10
    faults = [
        "slow=3:1.1@1-2",
        "slow-link=9:0.0,0.1@1-2",
        "flaky-link=0.3:1.0,1.1@1-2",
        "nan:1.1@3",
        "kill:1.1@5",
        "rejoin:1.1@7",
    ]
    run = launch(JOB, steps, *faults)
    assert_same_training(run, calm_run(JOB, launch, steps))
    assert [(e["kind"], e["step"], e.get("cause")) for e in run.events if e["kind"] in ("undone", "rejoined")][:1] == [
        ("undone", 3, "a gradient is not finite")
    ]
    live = live_workers(run)
    assert live.index(5) in (4, 5)  # a worker may be killed in a step while others still report the previous one
    assert live == [6] * live.index(5) + [5] * live.count(5) + [6] * (steps - live.index(5) - live.count(5))
    assert live[-1] == 6


def test_page_has_every_kind_with_its_example_and_limit():
    rows = written(KIND_HEAD)
    assert [row[0].strip("`") for row in rows] == list(KINDS)
    for name, example, does, _, at_most, _, losses in rows:
        kind = KINDS[name.strip("`")]
        assert (example, does, losses) == (f"`{kind.example}`", kind.does, "identical")
        assert at_most == LIMITS.get(name.strip("`"), "0.2")


def test_page_has_every_phase_in_order():
    phases_section = PAGE.read_text().split("\n## Phases\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([a-z]+)` \|", phases_section, flags=re.MULTILINE)
    assert tuple(listed) == PHASES
    assert set(BETWEEN) < set(PHASES)
    assert [cells[0].strip("`") for cells in written(MATRIX_HEAD)] == ENDING
    for name, *cells, _ in written(MATRIX_HEAD):
        struck = [phase for phase, cell in zip(COLUMNS, cells, strict=True) if cell != "–"]
        assert struck == phases(KINDS[name.strip("`")])
