"""Placement and split chosen together, within memory, from the first plans."""

from itertools import combinations, pairwise

import msgspec
import pytest

from recycle import Job, PlanError, Worker, simulate
from recycle.job import price
from recycle.solve.partition import PLACEMENTS, _first_period
from recycle.solve.planner import plan
from tests.cli.command import Command

HEAVY = """
[shape]
pipelines = 2
ranks = {ranks}
chunks = {chunks}
micro_batches = 8
placement = "{placement}"
[model]
kind = "gpt"
layers = {layers}
hidden = 4096
heads = 32
sequence = 4096
vocabulary = 128256
split = {split}
[times]
profile = "analytic"
[memory]
limit = "{limit}"
"""


def heavy(
    limit: str, layers: int, ranks: int = 3, chunks: int = 1, placement: str = "loop", split: str = '"auto"'
) -> Job:
    """A model whose embedding takes the memory, and whose head takes the time, of several layers."""
    return Job.from_toml(HEAVY.format(**locals()))


def splits(layers: int, stages: int) -> list[list[int]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [[b - a for a, b in pairwise((0, *cut, layers))] for cut in cuts]


@pytest.mark.parametrize(
    ("limit", "chunks", "placement"), [("60 GiB", 1, "loop"), ("200 GiB", 1, "loop"), ("75 GiB", 2, "auto")]
)
def test_the_split_is_as_good_as_the_best_of_all_splits(limit, chunks, placement):
    ranks = 3 if chunks == 1 else 2
    job = heavy(limit, 12, ranks, chunks, placement)
    settled = price(job)
    every = [
        heavy(limit, 12, ranks, chunks, each, str(sizes))
        for each in (PLACEMENTS if placement == "auto" else (placement,))
        for sizes in splits(12, ranks * chunks)
    ]
    assert _first_period(settled) <= 1.01 * min(map(_first_period, every))
    assert sum(settled.layers_per_stage()) == 12


def test_a_split_that_fits_into_memory_is_found_where_the_even_one_does_not():
    job = heavy("40 GiB", 32, ranks=8)
    even = heavy("40 GiB", 32, ranks=8, split=str(job.model.split))
    with pytest.raises(PlanError, match="activation"):
        plan(even, seconds=0.1)
    assert plan(job, seconds=0.1).period > 0
    assert price(job).to_toml() == price(Job.from_toml(price(job).to_toml())).to_toml()


def test_all_users_of_a_job_have_one_placement_and_split():
    job = heavy("110 GiB", 12, ranks=2, chunks=2, placement="auto")
    for failed in ((), (Worker(0, 1),)):
        planned = plan(job, failed, steps=10)
        assert planned.schedule.placing == price(job).grid.placement
        assert simulate(planned.schedule, price(job).prices).period == pytest.approx(planned.period)


def test_a_profile_keeps_the_split_it_was_measured_with(tmp_path, capsys):
    job = price(heavy("90 GiB", 12))
    text = HEAVY.format(limit="90 GiB", ranks=3, chunks=1, placement="loop", layers=12, split='"auto"')
    (tmp_path / "job.toml").write_text(text.replace('"analytic"', '"measured.json"') + "[planner]\nsteps = 1\n")
    for split in [2, 1, 9], [1, 2, 9]:  # a file that is written again counts
        measured = msgspec.structs.replace(job.model, split=split)
        profile = msgspec.structs.replace(job, model=measured).profile()
        object.__setattr__(profile, "measured", {"model": msgspec.to_builtins(measured)})
        profile.save(tmp_path / "measured.json")
        assert price(Job.load(tmp_path / "job.toml")).model.split == split
    assert (
        "layers of the stages, as [model] split: [1, 2, 9]"
        in Command(capsys)("plan --processes 1", tmp_path / "job.toml").out
    )
