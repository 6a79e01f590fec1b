"""`recycle simulate`: figures as one JSON object or a table, and bad values refused."""

from pathlib import Path

import pytest

from recycle import Link, Profile, Schedule, Shape
from recycle.ir.families import one_f_one_b
from tests.cli.command import Command

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture(autouse=True)
def file() -> None:
    one_f_one_b(Shape(1, 4, 8)).save("1f1b.json")


def test_the_figures_of_1f1b(command: Command) -> None:
    outcome = command("simulate 1f1b.json --json")
    figures = outcome.json
    assert (outcome.status, outcome.err) == (0, "")
    assert (figures["makespan"], figures["period"]) == (33, 33)
    assert figures["bubble_ratio"] == pytest.approx(9 / 33)
    assert figures["inner_bubble"] == [9, 6, 3, 0]
    assert figures["peak_activations"] == figures["peak_bytes"] == [4, 3, 2, 1]
    path = figures["critical_path"]
    assert (path[0]["instruction"], path[0]["start"]) == ("0F0.0", 0)
    assert (path[-1]["instruction"], path[-1]["end"]) == ("0B0.7", 33)


@pytest.mark.parametrize(
    ("line", "makespan"),
    [
        ("1f1b.json --times 2,3,1", 66),
        ("1f1b.json --times 0,0,0", 0),
        ("1f1b.json --comm 0.5", 41),
        ("1f1b.json --job job.toml", 41),
        ("1f1b.json --job job.toml --comm 0", 33),
        ("1f1b.json --profile p.json", 66),
        ("1f1b.json --profile slow.json", 76),
        ("1f1b.json --profile slow.json --comm 0", 33),
        ("pairs.json", 9),
        ("pairs.json --overlap 2", 7),
        ("pairs.json --times 2,1,1", 12),
    ],
)
def test_times_overlap_and_comm_are_options(command: Command, line: str, makespan: float) -> None:
    Schedule.from_text(Shape(1, 1, 3), {"0.0": "0F0 (0F1;0B0) (0F2;0B1) 0B2"}).save("pairs.json")
    Path("job.toml").write_text("[shape]\npipelines = 1\nranks = 4\nmicro_batches = 8\n[times]\nlink = 0.5\n")
    Profile(2.0, 3.0, 1.0).save("p.json")
    Profile(links={"*.1>*.2": Link(8.0)}).save("slow.json")
    assert command(f"simulate {line} --json").json["makespan"] == makespan


def test_what_each_worker_waits_for_is_told_gap_by_gap(command: Command) -> None:
    figures = command("simulate 1f1b.json --comm 0.5 --json").json
    assert figures["gaps"][0][0] == {
        "start": 4, "end": 13, "cause": "order", "before": "0B0.0",
        "waits_for": {"worker": "0.1", "instruction": "1B0.0"}, "ready": "0F0.4",
    }  # fmt: skip
    assert figures["gaps"][1][1] == {
        "start": 1, "end": 1.5, "cause": "transfer", "before": "1F0.0",
        "waits_for": {"worker": "0.0", "instruction": "0SEND_F0.0@0.1"}, "ready": None,
    }  # fmt: skip
    assert figures["gaps"][3][-1] == {
        "start": 33.5, "end": 41, "cause": "nothing_left", "before": None, "waits_for": None, "ready": None,
    }  # fmt: skip
    lengths = [sum(gap["end"] - gap["start"] for gap in gaps) for gaps in figures["gaps"]]
    assert lengths == figures["bubble"] == [17] * 4


def test_the_critical_path_says_why_and_the_peak_where(command: Command) -> None:
    figures = command("simulate 1f1b.json --comm 0.5 --json").json
    assert [step["cause"] for step in figures["critical_path"][:4]] == [None, "data", "transfer", "data"]
    assert figures["peak_at"][1] == {"instruction": "1F0.2", "start": 3.5}


def test_a_job_gives_the_memory_that_holds_forwards_back(command: Command) -> None:
    shape = "[shape]\npipelines = 1\nranks = 4\nmicro_batches = 8\n"
    Path("job.toml").write_text(shape + "[times]\nlink = 0.5\n[memory]\nlimit = [4, 3, 2, 1]\n")
    assert command("simulate 1f1b.json --job job.toml --json").json["gaps"][0][0]["cause"] == "memory"


def test_failed_workers_are_null_in_every_list(command: Command) -> None:
    figures = command(f"simulate {CASES}/adaptive_without_1.2.json --json").json
    assert figures["makespan"] == 36
    for name in ("inner_bubble", "peak_activations", "peak_bytes", "bubble", "peak_at", "gaps"):
        assert len(figures[name]) == 12
        assert [n for n, value in enumerate(figures[name]) if value is None] == [6]


def test_a_profile_weighs_by_the_file(command: Command) -> None:
    Profile(activation=10.0, static=5.0).save("p.json")
    assert command("simulate 1f1b.json --profile p.json --json").json["peak_bytes"] == [45, 35, 25, 15]


def test_people_see_the_lanes_and_a_row_per_worker(command: Command) -> None:
    outcome = command("simulate 1f1b.json")
    assert "makespan 33   period 33   bubble ratio 0.2727" in outcome.out
    assert "  0.0 F0-F1-F2-F3-" in outcome.out
    assert sum(line.split()[:2] == [f"0.{r}", "24"] for line in outcome.out.splitlines() for r in range(4)) == 4


def test_people_see_seconds_per_cause_and_what_could_have_run(command: Command) -> None:
    lines = command("simulate 1f1b.json --comm 0.5").out.splitlines()
    rows = [line.split() for line in lines]
    assert ["worker", "input", "transfer", "reduce", "memory", "order", "nothing", "left"] in rows
    assert ["0.1", "5.5", "3", "0", "0", "6", "2.5"] in rows
    assert "worker 0.0 waits 9 from 4 for 0B0.0: 0F0.4 could run there" in lines
    assert any(line.endswith("1F0.2 at 3.5  ") for line in lines)
    failed = [line.split() for line in command(f"simulate {CASES}/adaptive_without_1.2.json").out.splitlines()]
    assert failed.count(["1.2", *["failed"] * 6]) == 2


def test_a_slow_link_is_slow_in_both_directions_and_no_other_is(command: Command) -> None:
    links = {pair: Link(2.0) for pair in ("0.1>0.2", "0.2>0.1")}
    Profile(latency=0.5, links=links).save("p.json")
    slow = command("simulate 1f1b.json --profile p.json --json").json
    assert command("simulate 1f1b.json --comm 0.5 --link 0.1,0.2=4 --json").json == slow
    assert slow["makespan"] > command("simulate 1f1b.json --comm 0.5 --json").json["makespan"] == 41
    Profile(latency=0.125, bandwidth=8.0, message=3.0).save("p.json")  # 0.5 in all
    assert command("simulate 1f1b.json --profile p.json --link 0.2,0.1=4 --json").json["makespan"] == slow["makespan"]


def test_a_schedule_with_errors_is_timed_and_said_to_have_them(command: Command) -> None:
    Path("broken.json").write_text(Path("1f1b.json").read_text().replace(" 0F0.7", ""))
    outcome = command("simulate broken.json --json")
    assert outcome.json["makespan"] > 0
    assert outcome.err == "recycle: broken.json breaks 1 rule(s), see recycle check broken.json\n"
