"""Every command reads every kind of schedule input, and keeps the times of traces."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recycle import Profile, Schedule, ScheduleError, Shape
from recycle.ir import formats
from recycle.ir.families import one_f_one_b
from viz.pages.validate_page import inspect
from viz.sources import load_sources

PLAN = one_f_one_b(Shape(1, 2, 2))
MICROSECONDS = {"F": 30, "B": 70}
NAMES = (
    "plan.json",
    "plan.csv",
    "plan.json.gz",
    "plan.csv.gz",
    "plan.trace.json",
    "table.json",
    "traces",
    "merged.json",
)


def labels(rank: int, begin=0.0):
    """A rank's labels in an iteration that begins at `begin`, one after another from 100 us times its rank on."""
    events, now = [], begin + 100.0 * rank
    for instruction in PLAN.program(PLAN.live[rank]):
        duration = MICROSECONDS[instruction.token]
        name = f"PP:{instruction.stage}{instruction.token}{instruction.micro_batch.index}"
        events.append({"ph": "X", "cat": "user_annotation", "name": name, "pid": rank, "ts": now, "dur": duration})
        now += duration + 5.0
    return events


def write_traces(folder: Path, iterations=1) -> Path:
    """A folder as torch's profiler leaves one: a file per rank, iterations 1 ms apart."""
    folder.mkdir(parents=True)
    for rank in (0, 1):
        events = [event for each in range(iterations) for event in labels(rank, 1000.0 * each)]
        content = {"distributedInfo": {"rank": rank}, "traceEvents": events}
        (folder / f"rank{rank}_trace.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def inputs():
    for name in ("plan.json", "plan.csv", "plan.trace.json"):
        formats.write(PLAN, Path(name))
    for name in ("plan.json", "plan.csv"):
        Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    formats.write(PLAN, Path("table.json"), "megatron-table")
    write_traces(Path("traces"))
    Path("merged.json").write_text(json.dumps([*labels(0), *labels(1)]))


@pytest.mark.parametrize("name", NAMES)
def test_every_command_reads_every_input(command, inputs, name):
    assert command(f"simulate {name} --times 1,1,1 --json").json["makespan"] == 9
    for line in ("check {}", "convert {} out.json", "view {} --export out.svg"):
        assert command(line.format(name)).status == 0
    assert Schedule.load("out.json") == Schedule.load(name) == PLAN
    if Path(name).is_file():
        assert inspect(Path(name).read_bytes(), name).schedule == PLAN


def test_folder_above_traces_names_the_trace_folder(command):
    write_traces(Path("profile/iteration_4"))
    for line in ("check {}", "simulate {}", "convert {} o.json", "view {} --export o.svg", "profile --from {}"):
        assert command(line.format("profile")).refused("profile/iteration_4")


def test_executed_trace_keeps_its_times(command, inputs):
    figures = command("simulate traces --json").json
    assert figures["executed"]
    assert figures["makespan"] == pytest.approx(315e-6)
    assert command("simulate plan.json --json").json["executed"] is False
    shown = load_sources([Path("traces")])[0]
    assert shown.executed
    assert shown.lanes.unit == "s"
    assert (shown.lanes.end - shown.lanes.start).max() == pytest.approx(70e-6)
    dropped = inspect(Path("merged.json").read_bytes(), "merged.json")
    assert dropped.executed
    assert dropped.timeline.makespan == pytest.approx(315e-6)


def change_rank(rank: int, change: Callable[[dict[str, Any]], dict[str, Any]]):
    file = Path("traces", f"rank{rank}_trace.json")
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | change(content)))


@pytest.mark.parametrize(
    ("iterations", "change", "makespan"),
    [
        (3, lambda content: {}, 315e-6),
        (3, lambda content: {"traceEvents": content["traceEvents"][4:8]}, 315e-6),  # the others traced two more
        (1, lambda content: {"baseTimeNanoseconds": 50_000}, 365e-6),
    ],
)
def test_ranks_are_put_on_one_clock(iterations, change, makespan):
    write_traces(Path("traces"), iterations)
    change_rank(1, change)
    ran = formats.read_input(Path("traces")).executed()
    assert ran.makespan == pytest.approx(makespan)
    if len(json.loads(Path("traces/rank1_trace.json").read_text())["traceEvents"]) == 12:
        assert ran.period == pytest.approx(1e-3), "between the iterations"


def test_complete_gpu_labels_give_the_times():
    def with_device(content):
        events = content["traceEvents"]
        on_device = {"cat": "gpu_user_annotation", "pid": 7, "tid": 3}
        added = [event | on_device | {"ts": event["ts"] + 4, "dur": event["dur"] * 2} for event in events]
        return {"traceEvents": [*events, *added[content["distributedInfo"]["rank"] :]]}

    write_traces(Path("traces"))
    for rank in (0, 1):
        change_rank(rank, with_device)
    profile = formats.read_input(Path("traces")).profile()
    assert profile.forward == pytest.approx([60e-6, 30e-6])


def test_a_trace_becomes_a_profile(command, inputs):
    printed = command("profile --from traces --json").json["profile"]
    assert command("profile --from traces -o p.json").status == 0
    profile = Profile.load("p.json")
    assert profile.to_json()["forward"] == printed["forward"] == [30e-6, 30e-6]
    assert profile.backward_input == profile.backward_weight == [35e-6, 35e-6]
    assert command("simulate plan.json --profile p.json").status == 0


@pytest.mark.parametrize("ahead", [0, 50_000])
def test_transfers_in_a_trace_become_links_on_one_clock(command, ahead):
    rows = [[("0F0", 0, 3), ("0SEND_F0", 3, 7), ("0RECV_B0", 12, 22), ("0B0", 22, 24)],
            [("1RECV_F0", 1, 8), ("1F0", 8, 11), ("1B0", 11, 13), ("1SEND_B0", 13, 14)]]  # fmt: skip
    events = [
        {"ph": "X", "name": f"PP:{name}", "pid": rank, "ts": begin + rank * ahead, "dur": end - begin}
        for rank, row in enumerate(rows)
        for name, begin, end in row
    ]
    Path("t.trace.json").write_text(json.dumps({"traceEvents": events}))
    profile = command("profile --from t.trace.json --json").json["profile"]
    exact = 1e-9 if not ahead else 2.1e-6  # half of what the two directions differ by
    assert profile["links"]["0.0>0.1"]["latency"] == pytest.approx(5e-6, abs=exact)
    assert profile["links"]["0.1>0.0"]["latency"] == pytest.approx(9e-6, abs=exact)
    assert profile["latency"] == pytest.approx(7e-6)
    simulated = command("simulate t.trace.json --json")
    assert simulated.json["makespan"] == pytest.approx(24e-6)
    said = "recycle: t.trace.json: the workers' clocks differed by up to 49.998 ms and are aligned to ± 0.007 ms"
    assert (said in simulated.err) == bool(ahead)


def test_a_timeline_keeps_the_profile_that_it_was_written_with(command, inputs):
    assert command("convert plan.json timed.trace.json --times 2,3,1").status == 0
    assert command("simulate timed.trace.json --json").json["makespan"] == 18
    assert command("profile --from timed.trace.json --json").json["profile"]["backward_input"] == 3


def test_gzip_of_several_members_is_read_whole(inputs):
    rows = Path("plan.csv").read_bytes().splitlines(keepends=True)
    Path("rows.csv.gz").write_bytes(b"".join(map(gzip.compress, rows)) + bytes(8))
    assert Schedule.load(Path("rows.csv.gz")) == PLAN
    Path("rows.csv.gz").write_bytes(gzip.compress(rows[0]) + rows[1])
    with pytest.raises(ScheduleError, match=r"rows\.csv\.gz: "):
        Schedule.load(Path("rows.csv.gz"))


@pytest.mark.parametrize("name", ["0F999999999", "0B999999999"])
def test_numbers_beyond_the_shape_are_findings(command, name):
    events = [*({**event, "pid": 0} for event in labels(0)), {**labels(0)[0], "name": f"PP:{name}", "ts": 900}]
    Path("t.trace.json").write_text(json.dumps({"traceEvents": events}))
    assert command("check t.trace.json").status == 1
    assert command("profile --from t.trace.json").status == 2
