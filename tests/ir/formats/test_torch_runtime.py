"""torch's own runtime runs what we export, with the gradients of the unpipelined model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recycle import Schedule, Shape, check, lower
from recycle.ir.families import FAMILIES
from recycle.ir.formats import torch_csv
from tests.ir.formats.test_torch_csv import VALID
from tests.ir.formats.torch_referee import Case, Referee
from tests.ir.test_check import DEFECTS

pytestmark = pytest.mark.process
TOLERANCE = 1e-5
ONE_CHUNK = (Shape(1, 4, 8), Shape(1, 2, 5))
TWO_CHUNKS = (Shape(1, 4, 8, 2), Shape(1, 2, 6, 2))
SHAPES: dict[str, tuple[Shape, ...]] = {
    "gpipe": ONE_CHUNK,
    "1f1b": ONE_CHUNK,
    "interleaved": TWO_CHUNKS,
    "looped-bfs": TWO_CHUNKS,
    "zb-h1": ONE_CHUNK,
    "zb-h2": ONE_CHUNK,
    "zb-v": TWO_CHUNKS,
    "v-half": TWO_CHUNKS,
    "v-min": TWO_CHUNKS,
    "dualpipe-v": TWO_CHUNKS,
}
"""Family -> what it is run with."""
RUNS = [(name, shape) for name in FAMILIES for shape in SHAPES.get(name, ())]


@pytest.fixture(scope="module")
def referee(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Referee]:
    with Referee(tmp_path_factory.mktemp("torch"), processes=4) as referee:
        if referee.missing:
            pytest.skip(f"this torch's _PipelineScheduleRuntime has no {', '.join(referee.missing)}")
        yield referee


def case(schedule: Schedule, communicates: bool) -> Case:
    return Case(torch_csv.dumps(schedule), schedule.placement, schedule.shape.micro_batches, communicates)


def test_every_family_is_put_before_the_referee() -> None:
    assert not set(FAMILIES) - set(SHAPES), "give them shapes"
    assert len({name for name, _ in RUNS}) == len(FAMILIES)


@pytest.mark.parametrize(
    "communicates", [pytest.param(False, marks=pytest.mark.soak), True], ids=["compute-only", "lowered"]
)
@pytest.mark.parametrize(("family", "shape"), RUNS, ids=str)
def test_torch_gets_the_unpipelined_gradients_from_our_file(
    referee: Referee, family: str, shape: Shape, communicates: bool
) -> None:
    schedule = FAMILIES[family](shape)
    assert check(schedule) == []
    judge(referee, schedule, communicates)


@pytest.mark.parametrize("communicates", [False, True], ids=["compute-only", "lowered"])
@pytest.mark.parametrize("name", ["v", "arbitrary", "overlapped", "split"])
def test_torch_runs_any_placement_split_backwards_and_overlapped_pairs(
    referee: Referee, name: str, communicates: bool
) -> None:
    judge(referee, VALID[name], communicates)


def judge(referee: Referee, schedule: Schedule, communicates: bool) -> None:
    """Run it and look at the loss of every micro-batch and the six parameters of every stage."""
    shape = schedule.shape
    errors = referee.errors(case(lower(schedule) if communicates else schedule, communicates))
    assert {f"loss {j}" for j in range(shape.micro_batches)} < set(errors)
    assert len(errors) == shape.micro_batches + 6 * shape.stages
    assert max(errors.values()) <= TOLERANCE, max(errors, key=errors.__getitem__)


def test_the_referee_sees_a_micro_batch_taken_for_another_and_so_do_we(referee: Referee) -> None:
    first, second, micro_batches, _ = DEFECTS["7 receives out of order"]
    schedule = torch_csv.loads(f"{first}\r\n{second}\r\n")
    assert [finding.rule for finding in check(schedule)] == ["fifo"]
    written = case(schedule, communicates=True)
    assert written.text == f"{first}\r\n{second}\r\n"
    assert written.micro_batches == micro_batches
    errors = referee.errors(written)
    assert max(errors.values()) > 0.1


def test_the_referee_sees_a_reduce_left_out(referee: Referee) -> None:
    lowered = case(lower(FAMILIES["1f1b"](Shape(1, 2, 5))), communicates=True)
    without = Case(lowered.text.replace(",1REDUCE_GRAD", ""), lowered.stages, lowered.micro_batches, True)
    errors = referee.errors(without)
    wrong = {name.split(".")[0]: round(error, 3) for name, error in errors.items() if error > TOLERANCE}
    assert wrong == {"1": 4.0}  # five times the gradient is off by four times
    assert "missing-reduce" in [finding.rule for finding in check(torch_csv.loads(without.text))]


def test_a_file_that_torch_cannot_run_is_told_and_the_next_one_runs(referee: Referee) -> None:
    good = case(FAMILIES["gpipe"](Shape(1, 2, 5)), communicates=False)
    bad = Case("0F0,0B0\r\n1B0,1F0\r\n", good.stages, 1, False)
    with pytest.raises(RuntimeError, match=r"rank [01]: "):
        referee.errors(bad)
    assert max(referee.errors(good).values()) <= TOLERANCE
