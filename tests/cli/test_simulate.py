"""`recycle simulate`: figures as one JSON object or a table, and bad values refused."""

from pathlib import Path

import pytest

from recycle import Profile, Schedule, Shape
from recycle.ir.families import one_f_one_b
from tests.cli.command import Command

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    one_f_one_b(Shape(1, 4, 8)).save(tmp_path / "1f1b.json")
    return tmp_path / "1f1b.json"


def test_the_figures_of_1f1b(command: Command, file: Path) -> None:
    outcome = command("simulate", file, "--json")
    figures = outcome.json
    assert (outcome.status, outcome.err) == (0, "")
    assert (figures["makespan"], figures["period"]) == (33, 33)
    assert figures["bubble_ratio"] == pytest.approx(9 / 33)
    assert figures["inner_bubble"] == [9, 6, 3, 0]
    assert figures["peak_activations"] == figures["peak_bytes"] == [4, 3, 2, 1]
    path = figures["critical_path"]
    assert (path[0]["instruction"], path[0]["start"]) == ("0F0.0", 0)
    assert (path[-1]["instruction"], path[-1]["end"]) == ("0B0.7", 33)


def test_times_overlap_and_comm_are_options(command: Command, file: Path, tmp_path: Path) -> None:
    assert command("simulate", file, "--times", "2,3,1", "--json").json["makespan"] == 66
    assert command("simulate", file, "--comm", "0.5", "--json").json["makespan"] == 41
    pairs = tmp_path / "pairs.json"
    Schedule.from_text(Shape(1, 1, 3), {"0.0": "0F0 (0F1;0B0) (0F2;0B1) 0B2"}).save(pairs)
    assert command("simulate", pairs, "--json").json["makespan"] == 9
    assert command("simulate", pairs, "--overlap", "2", "--json").json["makespan"] == 7
    assert command("simulate", pairs, "--times", "2,1,1", "--json").json["makespan"] == 12


def test_failed_workers_are_null_in_every_list(command: Command) -> None:
    figures = command("simulate", CASES / "adaptive_without_1.2.json", "--json").json
    assert figures["makespan"] == 36
    for name in ("inner_bubble", "peak_activations", "peak_bytes", "bubble"):
        assert len(figures[name]) == 12
        assert [n for n, value in enumerate(figures[name]) if value is None] == [6]


def test_a_profile_prices_by_the_file(command: Command, file: Path, tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    Profile(2.0, 3.0, 1.0, activation=10.0, static=5.0).save(profile)
    figures = command("simulate", file, "--profile", profile, "--json").json
    assert figures["makespan"] == 66
    assert figures["peak_bytes"] == [45, 35, 25, 15]
    assert command("simulate", file, "--profile", profile, "--times", "1,1,1").refused("--times or --profile")
    assert command("simulate", file, "--profile", file).refused(str(file), "is not a field of a profile")


def test_people_see_the_lanes_and_a_row_per_worker(command: Command, file: Path) -> None:
    outcome = command("simulate", file)
    assert "makespan 33   period 33   bubble ratio 0.2727" in outcome.out
    assert "  0.0 F0-F1-F2-F3-" in outcome.out
    assert sum(line.split()[:2] == [f"0.{r}", "24"] for line in outcome.out.splitlines() for r in range(4)) == 4


@pytest.mark.parametrize("times", ["1,2", "1,2,3,4", "1,2,x", "1,2,nan", "1,2,inf", "-1,2,3", "", "1,,2"])
def test_bad_times_are_refused(command: Command, file: Path, times: str) -> None:
    assert command("simulate", file, f"--times={times}").refused("--times", "F,I,W", "at least 0")


def test_other_bad_values_are_refused(command: Command, file: Path, tmp_path: Path) -> None:
    assert command("simulate", file, "--comm=-1").refused("--comm")
    assert command("simulate", file, "--overlap", "1,2").refused("--overlap")
    assert command("simulate", tmp_path / "none.json").refused("none.json", "cannot be read")
    assert command("simulate", file, "--profile", tmp_path / "none.json").refused("cannot be read")
    deadlock = tmp_path / "deadlock.json"
    Schedule.from_text(Shape(1, 2, 2), {"0.0": "0F0 0B0 0F1 0B1", "0.1": "1F1 1F0 1B0 1B1"}).save(deadlock)
    assert command("simulate", deadlock, "--json").refused("deadlocks", "recycle check")


def test_zero_times_are_allowed(command: Command, file: Path) -> None:
    figures = command("simulate", file, "--times", "0,0,0", "--json").json
    assert (figures["makespan"], figures["period"]) == (0, 0)


def test_a_schedule_with_errors_is_timed_and_said_to_have_them(command: Command, file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(file.read_text().replace(" 0F0.7", ""))
    outcome = command("simulate", broken, "--json")
    assert outcome.json["makespan"] > 0
    assert outcome.err == f"recycle: {broken} breaks 1 rule(s), see recycle check {broken}\n"
