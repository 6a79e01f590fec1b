"""Chrome traces of schedules show the simulated times; damaged files are refused."""

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from recycle import Profile, Schedule, ScheduleError, Shape, Worker, check, lower, simulate
from recycle.ir import formats
from recycle.ir.families import one_f_one_b
from recycle.ir.formats import chrome_trace
from recycle.runs import logs
from tests.ir.random_schedules import random_schedule

TIMES = Profile(1.0, 2.0, 0.5, latency=0.25, weight_stash=0.5)


def text(schedule: Schedule, profile: Profile | None = None) -> str:
    return "".join(chrome_trace.dumps(schedule, profile))


def file(schedule: Schedule, profile: Profile | None = None):
    return json.loads(text(schedule, profile))


def events(schedule: Schedule, phase: str, profile: Profile | None = None):
    return [event for event in file(schedule, profile)["traceEvents"] if event["ph"] == phase]


def rerouted() -> Schedule:
    """Three pipelines of two ranks; worker 1.1 is dead and its micro-batches run on 0.1 and 2.1."""
    return Schedule.from_text(
        Shape(3, 2, 2),
        {
            "0.0": "0F0.0 0F0.1 0I0.0 0I0.1 0W0.1 0W0.0",
            "0.1": "1F0.0 1B0.0 1F1.0 1I1.0 1F0.1 1I0.1 1W1.0 1W0.1",
            "1.0": "0F1.0 0F1.1 0B1.0 0B1.1",
            "2.0": "0F2.0 0F2.1 0B2.0 0B2.1",
            "2.1": "1F2.0 1B2.0 1F1.1 1B1.1 1F2.1 1B2.1",
        },
        failed=["1.1"],
        metadata={"note": 'quotes " and \\ and é', "nested": {"list": [1, 2.5, None, True]}},
    )


# What viewers are shown


@pytest.mark.parametrize("profile", [None, TIMES])
def test_slices_have_the_simulators_times_in_microseconds(profile):
    schedule = rerouted()
    timeline = simulate(schedule, profile)
    slices = events(schedule, "X", profile)
    assert len(slices) == len(timeline.schedule.columns) == 62
    assert [event["name"] for event in slices] == [str(timeline.schedule.instruction(row)) for row in range(62)]
    assert [event["ts"] for event in slices] == [1e6 * start for start in timeline.start]
    assert [event["dur"] for event in slices] == [1e6 * seconds for seconds in timeline.end - timeline.start]
    assert {event["pid"] - 1 for event in slices} == {0, 1, 2, 4, 5}


def test_slices_of_one_thread_never_overlap():
    rng = random.Random(5)
    profile = Profile(0.1, 0.2, 0.3, latency=0.7, step=0.05)
    for _ in range(20):
        threads = defaultdict(list)
        for event in events(random_schedule(rng), "X", profile):
            threads[event["pid"], event["tid"]].append((round(1000 * event["ts"]), round(1000 * event["dur"])))
        for slices in threads.values():
            slices.sort()
            assert all(a + length <= b for (a, length), (b, _) in pairwise(slices))


def test_arguments_state_worker_position_home_and_rerouting():
    slices = {event["name"]: event["args"] for event in events(rerouted(), "X")}
    assert slices["1F1.0"] == {
        "worker": "0.1", "position": 2, "stage": 1, "home": 1, "micro_batch": 0, "rerouted": True,
    }  # fmt: skip
    assert slices["0F1.0"]["rerouted"] is False
    assert slices["1STEP"] == {"worker": "2.1", "position": None, "stage": 1}


def arrows(schedule: Schedule, profile: Profile | None = None) -> list[tuple[str, str, str]]:
    """(name, slice at the beginning, slice at the end) of each arrow; every end directly follows its slice."""
    slice_ = {}
    ends = defaultdict(dict)
    for event in file(schedule, profile)["traceEvents"]:
        if event["ph"] == "X":
            slice_ = event
        elif event["ph"] in "sf":
            assert (event["pid"], event["tid"], event["ts"]) == (slice_["pid"], slice_["tid"], slice_["ts"])
            assert (event.get("bp") == "e") == (event["ph"] == "f")
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = (event["name"], event["cat"], slice_["name"])
    assert all(set(both) == {"s", "f"} and both["s"][:2] == both["f"][:2] for both in ends.values())
    return sorted((both["s"][0], both["s"][2], both["f"][2]) for both in ends.values())


def test_arrows_lead_from_each_send_to_its_receive_and_along_rerouted_activations():
    lines = arrows(rerouted(), TIMES)
    assert len(lines) == 12 + 2
    assert ("activation", "0SEND_F1.0@0.1", "1RECV_F1.0@1.0") in lines
    assert ("input gradient", "1SEND_B1.1@1.0", "0RECV_B1.1@2.1") in lines
    assert [arrow for arrow in lines if arrow[0] == "re-routed activation"] == [
        ("re-routed activation", "0F1.0", "1F1.0"),
        ("re-routed activation", "0F1.1", "1F1.1"),
    ]


def test_counters_of_any_schedule_reach_the_simulators_peak_and_end_at_nothing():
    rng = random.Random(9)
    for _ in range(20):
        schedule = random_schedule(rng)
        peaks = simulate(schedule, TIMES).peak_activations
        counters = defaultdict(list)
        for event in events(schedule, "C", TIMES):
            counters[event["pid"] - 1].append(event["args"]["chunks"])
        for w, peak in enumerate(peaks):
            assert max(counters[w], default=None) == peak or not peak
            assert counters[w][-1:] in ([], [0])
            assert min(counters[w], default=0) >= 0


def test_a_schedule_without_timeline_is_refused_and_leaves_no_file(tmp_path):
    deadlock = Schedule.from_text(Shape(1, 2, 2), {"0.0": "0B0 0F0 0F1 0B1", "0.1": "1F0 1B0 1F1 1B1"})
    with pytest.raises(ScheduleError, match="the schedule deadlocks"):
        formats.write(deadlock, tmp_path / "t.trace.json")
    with pytest.raises(ScheduleError, match=r"a makespan of 3\.3e\+09 cannot be written to the nanosecond"):
        formats.write(one_f_one_b(Shape(1, 4, 8)), tmp_path / "t.trace.json", profile=Profile(1e8, 1e8, 1e8))
    assert list(tmp_path.iterdir()) == []


# What is refused


def altered(change) -> bytes:
    content = file(one_f_one_b(Shape(1, 2, 2)))
    change(content)
    return json.dumps(content).encode()


def slice_of(content, name: str):
    return next(event for event in content["traceEvents"] if event["name"] == name)


def slice_with(name: str, **entries) -> bytes:
    """The file with entries of one slice's args replaced."""
    return altered(lambda content: slice_of(content, name)["args"].update(entries))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x1f\x8b\x08nothing", "not a complete gzip file"),
        (b'{"traceEvents": []}', "no event is named PP:<action>"),
        (altered(lambda f: f["otherData"].update(version=2)), "version 2 is not known; this recycle reads version 1"),
        (altered(lambda f: f["otherData"].pop("instructions")), "otherData: instructions is missing"),
        (altered(lambda f: f["otherData"].update(instructions=[4, 10**9])), "at most the number of events"),
        (slice_with("0F0.0", position=9), r"traceEvents\[8\]: position 9 of worker 0.0, which has 4"),
        (slice_with("0F0.1", position=0), r"traceEvents\[\d+\]: position 0 of worker 0.0 occurs twice"),
        (altered(lambda f: f["traceEvents"].remove(slice_of(f, "1B0.1"))), "no event for position 3 of worker 0.1"),
        (altered(lambda f: slice_of(f, "0F0.0").update(name="0Q0")), r"traceEvents\[8\]: '0Q0' is not an instruction"),
    ],
)  # fmt: skip
def test_an_incomplete_file_is_refused_by_event(content, message):
    with pytest.raises(ScheduleError, match=rf"^t\.json: .*{message}"):
        chrome_trace.loads(content, "t.json")


# Executed runs


def log(run: Path, schedule: Schedule, step: int, workers: Sequence[Worker], players: Mapping[str, str]):
    """Write the logs of `workers` for a step of generation 7; `players` maps processes to other roles."""
    for worker in workers:
        process = Worker.parse(players.get(str(worker), str(worker)))
        ran = [(action, step + n / 100, step + n / 100 + 0.01) for n, action in enumerate(schedule.program(worker))]
        logs.append_iteration(logs.log_path(run, process), step, 7, worker, ran)


def merged(run: Path, shape: Shape) -> Path:
    logs.merge_logs(run, shape)
    return run / "trace.json"


def test_an_executed_run_gives_the_schedule_of_its_last_whole_step(tmp_path, caplog):
    schedule = lower(rerouted())
    for step in (3, 4):
        log(tmp_path, schedule, step, schedule.live, {"0.1": "2.1", "2.1": "0.1"})
    log(tmp_path, schedule, 5, schedule.live[:2], {})
    executed = formats.read(merged(tmp_path, schedule.shape))
    assert executed == schedule
    assert executed.metadata == {"executed": {"step": 4, "generation": 7}}
    assert check(executed) == []
    assert [message.removeprefix(f"{tmp_path / 'trace.json'}: ") for message in caplog.messages] == [
        "kept step 4 of generation 7, in role names; left out 2 other step(s) and all events", "left out the times"
    ]  # fmt: skip
    assert formats.read(tmp_path) == schedule
