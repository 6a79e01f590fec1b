"""A run directory that is read while it grows gives what one read of the whole directory gives."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recycle import Job, Worker
from recycle.runs.logs import append_iteration, log_path
from recycle.runs.read_report import RunReader
from recycle.runs.report import TimePart
from tests.runs.test_report import EVENTS, METRICS, line

SHAPE = "[shape]\npipelines = 2\nranks = {}\nmicro_batches = 2\n"


def append(path: Path, lines: Sequence[Mapping[str, Any]]):
    with path.open("a") as stream:
        stream.writelines(json.dumps(each) + "\n" for each in lines)


class GrowingRun:
    """A run directory, and a reader that has followed it from the start."""

    def __init__(self, path: Path):
        self.path = path
        (path / "job.toml").write_text(SHAPE.format(2))
        (path / "metrics.jsonl").write_text("")
        self.reader = RunReader(path)

    def require_same(self):
        followed, whole = self.reader.read(), RunReader(self.path).read()
        assert followed == whole
        assert followed.report.parts == whole.report.parts

    def work(self, worker: Worker, generation: int, step: int, start: float):
        rows = [("0F0.0", start, start + 0.2), ("0B0.0", start + 0.2, start + 0.6)]
        append_iteration(log_path(self.path, worker), step, generation, worker, rows)


def test_followed_run_is_the_whole_run_at_every_moment(tmp_path):
    run = GrowingRun(tmp_path)
    run.require_same()
    for moment in sorted({entry["time"] for entry in [*METRICS, *EVENTS]}):
        for name, lines in ("events.jsonl", EVENTS), ("metrics.jsonl", METRICS):
            append(tmp_path / name, [entry for entry in lines if entry["time"] == moment])
        for entry in METRICS:
            if entry["time"] == moment:
                for worker in Job.of_run(tmp_path).shape.workers():
                    run.work(worker, entry["generation"], entry["step"], moment - 0.8)
                    run.require_same()
        run.require_same()
    record = run.reader.read()
    assert [entry["step"] for entry in record.metrics] == [0, 1, 2, 3, 4]
    assert record.report.parts == RunReader(tmp_path).read().report.parts
    assert 0 < record.report.effective_ratio == record.report.measured / record.report.wall < 1


def test_time_after_the_last_iteration_counts_without_a_trace(tmp_path):
    GrowingRun(tmp_path)
    (tmp_path / "job.toml").write_text(SHAPE.format(2) + '[train]\ntrace = "off"\n')
    (tmp_path / "store").write_text("{}")
    append(tmp_path / "metrics.jsonl", METRICS)
    append(tmp_path / "events.jsonl", [*EVENTS, {"time": 24.0, "kind": "checkpoint", "step": 4}])
    assert RunReader(tmp_path).read().report.wall == METRICS[-1]["time"]
    (tmp_path / "store").unlink()
    report = RunReader(tmp_path).read().report
    assert (report.wall, report.spans[-1].part) == (24.0, TimePart.CHECKPOINTING)


def test_removed_lines_are_forgotten(tmp_path):
    run = GrowingRun(tmp_path)
    append(tmp_path / "metrics.jsonl", METRICS)
    append(tmp_path / "events.jsonl", EVENTS)
    run.require_same()
    # A return to the checkpoint of step 1, after which the file is longer than before.
    (tmp_path / "metrics.jsonl").write_text("")
    append(tmp_path / "metrics.jsonl", [*METRICS[:2], *(line(step, 30.0 + step, 4) for step in range(2, 8))])
    run.require_same()
    assert [entry["time"] for entry in run.reader.read().metrics] == [12.0, 13.0, *(32.0 + step for step in range(6))]


def test_partial_line_counts_once_it_is_whole(tmp_path):
    run = GrowingRun(tmp_path)
    whole = json.dumps(METRICS[0])
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        for part, steps in (whole[:10], 0), (whole[10:], 1), ("\n", 1), (json.dumps(METRICS[1]) + "\n", 2):
            stream.write(part)
            stream.flush()
            run.require_same()
            assert len(run.reader.read().metrics) == steps


def test_damaged_events_do_not_count(tmp_path):
    run = GrowingRun(tmp_path)
    append(tmp_path / "metrics.jsonl", METRICS)
    generation = {"time": 20.5, "kind": "generation", "step": 4, "generation": 4}
    damaged = [generation | {"generation": "abc"}, generation | {"step": None}, {"kind": "detected", "time": "x"}, {}]
    append(tmp_path / "events.jsonl", [*EVENTS, *damaged, {"time": 20.5, "kind": "generation", "step": 4}])
    assert run.reader.read().events == EVENTS


def test_logs_of_an_earlier_shape_no_longer_count(tmp_path):
    run = GrowingRun(tmp_path)
    append(tmp_path / "metrics.jsonl", METRICS[:1])
    run.work(Worker(1, 1), 1, 0, 11.0)
    run.require_same()
    (tmp_path / "logs").rename(tmp_path / "earlier")
    (tmp_path / "job.toml").write_text(SHAPE.format(1))
    run.work(Worker(0, 0), 1, 0, 11.0)
    run.require_same()
    assert run.reader.read().job.shape.ranks == 1
