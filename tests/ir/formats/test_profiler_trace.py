"""Traces of torch's profiler, written by torch's pipeline runtime on two processes, give the schedules that it ran."""

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleInterleaved1F1B
from torch.profiler import ProfilerActivity, profile

from recycle import Schedule, ScheduleError, check
from recycle.ir import formats
from recycle.ir.formats import chrome_trace
from tests.warm import warm_context


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A directory with a folder of traces per schedule, and the CSV that torch wrote of each schedule."""
    directory = tmp_path_factory.mktemp("profiled")
    run_profiled(directory)
    return directory


@pytest.mark.parametrize("name", ["interleaved", "dualpipe"])
def test_a_directory_of_ranks_gives_the_schedule_that_torch_ran(profiled, name, caplog):
    schedule = formats.read(profiled / name)
    expected = formats.read(profiled / f"{name}.csv")
    assert schedule == expected
    assert schedule.metadata == expected.metadata == {"dropped": {"RESHARD": 4, "UNSHARD": 4}}
    assert check(schedule) == []
    assert caplog.messages[:2] == [
        f"{profiled / name}: kept the last whole one of 2 iterations",
        f"{profiled / name}: dropped 4 RESHARD and 4 UNSHARD: recycle's workers hold whole parameters",
    ]


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("pids", [(0, 1), (1, 0), (None, None), ("b", "a")])
def test_one_merged_file_is_read_by_process(profiled, pids, as_list, caplog):
    events = []
    for rank, pid in enumerate(pids):
        for event in json.loads((profiled / "interleaved" / f"of-rank-{rank}.json").read_text())["traceEvents"]:
            events.append(event | {"pid": event["pid"] if pid is None else pid})
    content = json.dumps(events if as_list else {"traceEvents": events}).encode()
    if pids == (1, 0):
        merged = chrome_trace.loads(content, "merged.json")
        assert merged.placement == ((1, 3), (0, 2))
        return
    assert chrome_trace.loads(content, "merged.json") == formats.read(profiled / "interleaved")
    assert ("as ranks, ordered by their first stages" in caplog.messages[0]) == (pids != (0, 1))


def test_an_export_of_nsight_systems_is_read_by_process(profiled, tmp_path):
    path = tmp_path / "report.sqlite"
    rows = [
        (int(1e3 * event["ts"]), int(1e3 * (event["ts"] + event["dur"])), event["name"], rank)
        for rank in (0, 1)
        for event in json.loads((profiled / "interleaved" / f"of-rank-{rank}.json").read_text())["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith("PP:")
    ]
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
        with pytest.raises(ScheduleError, match="no NVTX ranges can be read from it"):
            formats.read(path)
        columns = "start INT NOT NULL, end INT, eventType INT NOT NULL, text TEXT, globalTid INT, textId INT"
        database.execute(f"CREATE TABLE NVTX_EVENTS ({columns})")
        for number, (start, end, name, rank) in enumerate(rows):
            thread = (1 << 56) + ((100 + rank) << 24) + 7
            given = (None, number) if number % 2 else (f"{name}, op_id = {number}", None)  # interned, or as text
            database.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, ?)", (start, end, given[0], thread, given[1])
            )
            database.execute("INSERT INTO StringIds VALUES (?, ?)", (number, name))
        database.commit()
    read, expected = (formats.read_input(file) for file in (path, profiled / "interleaved"))
    assert read.order() == expected.order()
    assert len(read.trace) == len(expected.trace)
    assert (read.trace.end - read.trace.start).sum() == pytest.approx(
        (expected.trace.end - expected.trace.start).sum(), rel=1e-3
    )


def test_a_single_rank_and_a_schedule_without_labels_are_refused(profiled):
    with pytest.raises(ScheduleError, match=r"of-rank-0\.json: no rank runs stage 1: give the traces of all ranks"):
        formats.read(profiled / "interleaved" / "of-rank-0.json")
    with pytest.raises(ScheduleError, match=r"of-rank-0\.json: no event is named PP:<action>"):
        formats.read(profiled / "unlabelled" / "of-rank-0.json")
    with pytest.raises(ScheduleError, match="unlabelled: rank 0 has no label PP:<action>"):
        formats.read(profiled / "unlabelled")


def label(text: str, begin: float, **entries):
    return {"ph": "X", "cat": "user_annotation", "name": f"PP:{text}", "pid": 0, "ts": begin, "dur": 1.0, **entries}


def events(*rows: str):
    """A process per row, its actions one after another."""
    return [label(text, n, pid=pid) for pid, row in enumerate(rows) for n, text in enumerate(row.split())]


def read(labels) -> Schedule:
    return chrome_trace.loads(json.dumps({"traceEvents": labels}).encode(), "t.json")


ROWS = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_actions_are_ordered_by_start_and_copies_on_a_gpu_are_ignored():
    labels = events(*ROWS)
    on_device = [label(event["name"][3:], 100 - event["ts"], cat="gpu_user_annotation") for event in labels]
    other = [{"ph": "M", "name": "process_name", "pid": "x"}, {"ph": "X", "name": None}, {"name": ["PP:"]}]
    schedule = read([*on_device, *other, *labels[::-1]])
    assert schedule.text() == {"0.0": "0F0.0 0F0.1 0B0.0 0B0.1", "0.1": "1F0.0 1B0.0 1F0.1 1B0.1"}


def test_the_last_complete_iteration_is_kept_with_its_sharding_actions(caplog):
    first = "0UNSHARD 0F0 0B0 0F1 0B1 0RESHARD"
    second = "0UNSHARD 0F1 0RESHARD 0UNSHARD 0F0 0B1 0B0 0RESHARD"
    schedule = read(events(f"{first} {second} 0UNSHARD 0F0"))
    assert schedule.text() == {"0.0": "0F0.1 0F0.0 0B0.1 0B0.0"}
    assert schedule.metadata == {"dropped": {"RESHARD": 2, "UNSHARD": 2}}
    assert caplog.messages[0] == "t.json: kept the last whole one of 3 iterations"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([label("0F0junk", 0)], r"traceEvents\[0\]: '0F0junk' is not an action"),
        ([label("0F0", 0, ph="B")], r"traceEvents\[0\]: 'PP:0F0': Invalid enum value 'B' - at `ph`"),
        ([label("0F0", 0, ts="0")], r"traceEvents\[0\]: 'PP:0F0': Expected `float`, got `str` - at `ts`"),
        ([label("0F0", 0, pid=None)], r"Expected `int \| str`, got `null` - at `pid`"),
        (events("0F0", "0F0"), "stage 0 runs in process 0 and in process 1: give the traces of one pipeline only"),
        (events("0F0 0SEND_F0 0RECV_B0 0B0"), "no rank runs stage 1"),
        (events("0F0 0SEND_F0", "999999999F0"), "no rank runs stage 1"),
    ],
)
def test_labels_that_give_no_schedule_are_refused_by_event(labels, message):
    with pytest.raises(ScheduleError, match=rf"^t\.json: .*{message}"):
        read(labels)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (({"rank": 0}, {"rank": 0}), r"b\.json: is a trace of rank 0, as .*a\.json is: keep one trace per rank"),
        (({"rank": 0}, {}), r"b\.json: distributedInfo\.rank is missing"),
    ],
)
def test_files_without_their_rank_are_refused(tmp_path, heads, message):
    for name, head, row in zip("ab", heads, ROWS, strict=True):
        content = {"distributedInfo": head, "traceEvents": events(row)}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(ScheduleError, match=message):
        formats.read(tmp_path)


RANKS, STAGES, WIDTH = 2, 4, 4
ITERATIONS = 2
LOOP = {0: (0, 2), 1: (1, 3)}
VEE = {0: (0, 3), 1: (1, 2)}


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def stages(rank: int, placement: dict[int, tuple[int, ...]], count: int) -> list[PipelineStage]:
    return [
        PipelineStage(torch.nn.Linear(WIDTH, WIDTH), stage, count, torch.device("cpu")) for stage in placement[rank]
    ]


def run_profiled(directory: Path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [warm_context().Process(target=_rank, args=(rank, store.port, directory)) for rank in range(RANKS)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * RANKS


def _rank(rank: int, port: int, directory: Path):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    schedules = {
        "interleaved": ScheduleInterleaved1F1B(stages(rank, LOOP, STAGES), 4, loss_fn=loss),
        "dualpipe": ScheduleDualPipeV(stages(rank, VEE, STAGES), 4, loss_fn=loss),
        "unlabelled": Schedule1F1B(stages(rank, {0: (0,), 1: (1,)}, RANKS)[0], 4, loss_fn=loss),
    }
    batch = torch.randn(8, WIDTH)
    for name, schedule in schedules.items():
        first = rank == 0
        last = rank == 0 if name == "dualpipe" else rank == 1
        given = ((batch,) if first else (), {"target": batch} if last else {})
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(ITERATIONS):
                schedule.step(*given[0], **given[1])
        (directory / name).mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(directory / name / f"of-rank-{rank}.json"))
        if name != "unlabelled" and rank == 0:
            schedule._dump_csv(str(directory / f"{name}.csv"), format="compute_comms")
    dist.destroy_process_group()
