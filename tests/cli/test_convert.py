"""`recycle convert`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recycle import Profile, Schedule, Shape, lower
from recycle.ir.families import one_f_one_b
from tests.cli.command import Command


def test_native_to_native_is_the_same_file(command: Command, tmp_path: Path) -> None:
    source, target = tmp_path / "a.json", tmp_path / "b.json"
    one_f_one_b(Shape(1, 2, 2)).save(source)
    assert command("convert", source, target).out == f"{target}: D=1 P=2 m=2, 8 instructions\n"
    assert target.read_bytes() == source.read_bytes()
    assert command("convert", source, tmp_path / "c", "--from", "native", "--to", "native").status == 0
    assert (tmp_path / "c").read_bytes() == source.read_bytes()


def test_unknown_formats_are_refused_with_the_list_and_write_nothing(command: Command, tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    one_f_one_b(Shape(1, 2, 2)).save(source)
    assert command("convert", source, tmp_path / "b.json", "--to", "xml").refused("'xml' is not a format", "native")
    assert command("convert", source, tmp_path / "b.json", "--from", "xml").refused("'xml' is not a format", "native")
    assert command("convert", source, tmp_path / "b.xml").refused("no format has the suffix '.xml'")
    assert command("convert", tmp_path / "none.json", tmp_path / "b.json").refused("cannot be read")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_timeline_is_priced_as_simulate_prices_it_and_converts_back_to_the_same_file(
    command: Command, tmp_path: Path
) -> None:
    source, timeline, back = tmp_path / "a.json", tmp_path / "a.trace.json", tmp_path / "b.json"
    lower(one_f_one_b(Shape(2, 2, 2))).with_metadata(note="kept").save(source)
    profile = tmp_path / "profile.json"
    Profile(1.0, 3.0, 2.0, latency=0.5).save(profile)
    for options in ((), ("--times", "1,3,2", "--comm", "0.5"), ("--profile", profile), ("--overlap", "4")):
        simulated = command("simulate", source, *options, "--json").json
        assert command("convert", source, timeline, *options).out == f"{timeline}: D=2 P=2 m=2, 40 instructions\n"
        written = json.loads(timeline.read_text())
        assert written["otherData"]["makespan"] == simulated["makespan"]
        assert max(e["ts"] + e["dur"] for e in written["traceEvents"] if e["ph"] == "X") == 1e6 * simulated["makespan"]
        assert command("convert", timeline, back).status == 0
        assert back.read_bytes() == source.read_bytes()


def test_a_timeline_that_stays_one_leaves_nothing_out(
    command: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, timeline, copy = tmp_path / "a.json", tmp_path / "a.trace.json", tmp_path / "b.trace.json"
    one_f_one_b(Shape(1, 2, 2)).save(source)
    assert command("convert", source, timeline, "--times", "1,3,2").status == 0
    assert command("convert", timeline, copy).status == 0
    assert json.loads(copy.read_text())["traceEvents"] == json.loads(timeline.read_text())["traceEvents"]
    assert caplog.messages == []
    assert command("convert", timeline, source).status == 0
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "option", [("--times", "1,1,1"), ("--overlap", "2"), ("--comm", "0.5"), ("--profile", "profile.json")]
)
@pytest.mark.parametrize(("target", "name"), [("b.json", "native"), ("b.csv", "torch-csv"), ("b.x", "megatron-table")])
def test_prices_are_refused_by_name_where_no_times_are_written(
    command: Command, tmp_path: Path, option: tuple[str, str], target: str, name: str
) -> None:
    source = tmp_path / "a.json"
    one_f_one_b(Shape(1, 2, 2)).save(source)
    to = ("--to", name) if target == "b.x" else ()
    done = command("convert", source, tmp_path / target, *to, *option)
    assert done.refused(option[0], "is for timelines (chrome-trace)", f"is written as {name}")
    assert not (tmp_path / target).exists()


def test_bad_prices_are_refused_by_name(command: Command, tmp_path: Path) -> None:
    source, target = tmp_path / "a.json", tmp_path / "a.trace.json"
    one_f_one_b(Shape(1, 2, 2)).save(source)
    assert command("convert", source, target, "--times", "1,1").refused("--times", "F,I,W")
    assert command("convert", source, target, "--times", "1,1,1", "--profile", source).refused("--times or --profile")
    assert command("convert", source, target, "--profile", tmp_path / "none").refused("none", "cannot be read")
    Profile([1.0, 1.0, 1.0]).save(tmp_path / "profile.json")
    assert command("convert", source, target, "--profile", tmp_path / "profile.json").refused("lists 3 stages")
    deadlock = Schedule.from_text(Shape(1, 1, 1), {"0.0": "0B0 0F0"})
    deadlock.save(source)
    assert command("convert", source, target).refused("deadlocks", "recycle check")
    assert not target.exists()


@pytest.mark.process
def test_what_is_dropped_is_said_on_standard_error(tmp_path: Path) -> None:
    source, target = tmp_path / "a.json", tmp_path / "a.csv"
    one_f_one_b(Shape(1, 2, 2)).save(source)
    code = "from recycle.cli import main; main()"
    line = [sys.executable, "-c", code, "convert", str(source), str(target)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == f"{target}: D=1 P=2 m=2, 8 instructions\n"
    assert done.stderr == "a torch CSV cannot hold, and leaves out: metadata (family)\n"
