"""`recycle convert`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recycle import Profile, Shape, lower
from recycle.ir.families import one_f_one_b
from tests.cli.command import Command


def test_native_to_native_is_the_same_file(command: Command) -> None:
    one_f_one_b(Shape(1, 2, 2)).save("a.json")
    for target, options in (("b.json", ""), ("c", "--from native --to native")):
        assert command(f"convert a.json {target} {options}").out == f"{target}: D=1 P=2 m=2, 8 instructions\n"
        assert Path(target).read_bytes() == Path("a.json").read_bytes()


def test_a_timeline_is_priced_as_simulate_prices_it_and_converts_back_to_the_same_file(
    command: Command,
) -> None:
    source, timeline, back = map(Path, ("a.json", "a.trace.json", "b.json"))
    lower(one_f_one_b(Shape(2, 2, 2))).with_metadata(note="kept").save(source)
    Profile(1.0, 3.0, 2.0, latency=0.5).save("profile.json")
    for options in ("", "--times 1,3,2 --comm 0.5", "--profile profile.json", "--overlap 4"):
        simulated = command(f"simulate {source} {options} --json").json
        assert command(f"convert {source} {timeline} {options}").out == f"{timeline}: D=2 P=2 m=2, 40 instructions\n"
        written = json.loads(timeline.read_text())
        assert written["otherData"]["makespan"] == simulated["makespan"]
        assert max(e["ts"] + e["dur"] for e in written["traceEvents"] if e["ph"] == "X") == 1e6 * simulated["makespan"]
        assert command(f"convert {timeline} {back}").status == 0
        assert back.read_bytes() == source.read_bytes()


def test_a_timeline_that_stays_one_leaves_nothing_out(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    source, timeline, copy = map(Path, ("a.json", "a.trace.json", "b.trace.json"))
    one_f_one_b(Shape(1, 2, 2)).save(source)
    assert command(f"convert {source} {timeline} --times 1,3,2").status == 0
    assert command(f"convert {timeline} {copy}").status == 0
    assert json.loads(copy.read_text())["traceEvents"] == json.loads(timeline.read_text())["traceEvents"]
    assert caplog.messages == []
    assert command(f"convert {timeline} {source}").status == 0
    assert len(caplog.messages) == 1


@pytest.mark.process
def test_what_is_dropped_is_said_on_standard_error() -> None:
    one_f_one_b(Shape(1, 2, 2)).save("a.json")
    line = [sys.executable, "-c", "from recycle.cli import main; main()", "convert", "a.json", "a.csv"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == "a.csv: D=1 P=2 m=2, 8 instructions\n"
    assert done.stderr == "a torch CSV cannot hold, and leaves out: metadata (family)\n"
