"""Forward-only schedules: checked, lowered and timed by rules of their own, on the workers of a training schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recycle import Profile, Schedule, ScheduleError, Shape, check, lower, simulate
from recycle.ir.families import FAMILIES, one_f_one_b, zb_h1
from recycle.ir.formats import read, write
from recycle.ir.lower import forward_only
from tests.cli.command import Command
from tests.ir.families.chunks import chunks_of

SHAPE = Shape(2, 4, 8)
REROUTED = {
    "0.0": "0F0.0 0F1.0 0B0.0 0B1.0",
    "0.1": "1F0.0 1F1.0 1I0.0 1W0.0 1B1.0",
    "1.1": "",
}


def rules(schedule: Schedule, **options: bool) -> list[str]:
    return [finding.rule for finding in check(schedule, **options)]


@pytest.mark.parametrize("family", FAMILIES)
def test_forwards_of_every_family_are_valid_and_run_where_training_runs_them(family: str) -> None:
    shape = Shape(2, 4, 8, chunks_of(family))
    trained = FAMILIES[family](shape)
    evaluated = forward_only(trained)
    assert rules(evaluated) == []
    assert rules(lower(evaluated), about_to_run=True) == []
    assert evaluated.placement == trained.placement
    for worker in shape.workers():
        text = str(trained.text()[str(worker)]).replace("(", " ").replace(";", " ").split()
        assert sorted(evaluated.text()[str(worker)].split()) == sorted(word for word in text if "F" in word)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_keep_workers_busy_and_hold_one_activation(family: str) -> None:
    """The busiest worker never waits but for the pipeline to fill, twice on a V."""
    chunks = chunks_of(family)
    timeline = simulate(forward_only(FAMILIES[family](Shape(2, 4, 16, chunks))))
    assert timeline.makespan <= 16 * chunks + 3 * chunks
    assert timeline.peak_activations == [1.0] * 8
    assert timeline.busy == [16.0 * chunks] * 8


def test_times_are_those_of_the_forwards_and_the_transfers() -> None:
    profile = Profile.uniform(forward=2.0, link=0.5)
    timeline = simulate(forward_only(zb_h1(SHAPE)), profile)
    assert timeline.makespan == 4 * 2.0 + 3 * 0.5 + 7 * 2.0
    assert timeline.period == 16.0


def test_micro_batches_of_the_dead_stay_with_who_took_them() -> None:
    trained = Schedule.from_text(Shape(2, 2, 1), REROUTED, failed=["1.0"])
    evaluated = forward_only(trained)
    assert evaluated.text() == {"0.0": "0F0.0 0F1.0", "0.1": "1F0.0 1F1.0", "1.1": ""}
    assert rules(evaluated) == []


def test_lowering_adds_transfers_of_activations_and_nothing_else() -> None:
    lowered = lower(forward_only(replace(one_f_one_b(Shape(1, 2, 1)), buckets=3)))
    assert lowered.text() == {"0.0": "0F0.0 0SEND_F0.0@0.1", "0.1": "1RECV_F0.0@0.0 1F0.0"}
    assert lower(lowered) == lowered


def test_the_same_programs_without_the_property_lack_their_backwards() -> None:
    evaluated = forward_only(one_f_one_b(Shape(1, 2, 1)))
    assert rules(replace(evaluated, forward_only=False)) == ["missing", "missing"]


@pytest.mark.parametrize("name", ["s.json", "s.trace.json"])
def test_files_keep_it(tmp_path: Path, name: str) -> None:
    evaluated = forward_only(one_f_one_b(Shape(1, 3, 2)))
    write(evaluated, tmp_path / name)
    assert read(tmp_path / name) == evaluated
    assert '"forward_only": true' in (tmp_path / name).read_text().replace('":true', '": true')
    write(one_f_one_b(Shape(1, 3, 2)), tmp_path / name)
    assert "forward_only" not in (tmp_path / name).read_text()


def test_a_file_that_has_anything_but_true_or_false_there_is_refused() -> None:
    text = forward_only(one_f_one_b(Shape(1, 1, 1))).dumps()
    with pytest.raises(ScheduleError, match="forward_only"):
        Schedule.loads(text.replace('"forward_only": true', '"forward_only": 1'))
    with pytest.raises(ScheduleError, match="forward_only must be true or false"):
        Schedule.from_text(Shape(1, 1, 1), {}, forward_only=1)  # type: ignore[arg-type]


def test_the_command_builds_checks_and_times_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command, file = Command(capsys), tmp_path / "s.json"
    built = command("schedule", "zb-h1", "-D", 2, "-P", 4, "-m", 8, "--forward-only", "-o", file)
    assert (built.status, built.err) == (0, "")
    assert Schedule.load(file) == forward_only(zb_h1(SHAPE))
    assert command("check", file, "--strict", "--json").json["findings"] == []
    timed = command("simulate", file, "--json")
    assert (timed.status, timed.err) == (0, "")
    assert (timed.json["makespan"], timed.json["period"]) == (11.0, 8.0)
    refused = command("schedule", "1f1b", "-P", 2, "-m", 2, "--forward-only", "--buckets", 2)
    assert refused.refused("--buckets: 2, but with --forward-only no gradient is summed")
    refused = command("schedule", "1f1b", "-P", 2, "-m", 2, "--forward-only", "--gather")
    assert refused.refused("--gather: with --forward-only no parameter is stepped")
