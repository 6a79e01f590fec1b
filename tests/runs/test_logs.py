"""Executed instructions are kept exactly: from logs of killed workers, through Chrome JSON, to columns."""

import json
from pathlib import Path

import numpy as np
import pytest

from recycle import RecycleError, Shape, Worker, simulate
from recycle.ir.families import one_f_one_b
from recycle.ir.formats import run_trace
from recycle.ir.trace import away_from
from recycle.runs import logs as runs

SHAPE = Shape(pipelines=2, ranks=2, micro_batches=2)


def run_directory(path: Path, steps=3, seconds=0.00123456789) -> Path:
    """A run of `steps` healthy iterations whose processes 0.1 and 1.1 swap roles in the last step."""
    timeline = simulate(one_f_one_b(SHAPE))
    schedule = timeline.schedule
    for step in range(steps):
        for w, worker in enumerate(SHAPE.workers()):
            rows = range(int(schedule.columns.offsets[w]), int(schedule.columns.offsets[w + 1]))
            ran = [
                (
                    schedule.instruction(row),
                    seconds * (timeline.start[row] + step * timeline.period),
                    seconds * (timeline.end[row] + step * timeline.period),
                )
                for row in rows
            ]
            swapped = step == steps - 1 and worker.rank == 1
            process = Worker(1 - worker.pipeline, 1) if swapped else worker
            runs.append_iteration(runs.log_path(path, process), step, int(swapped), worker, ran)
    events = [{"time": 0.5, "kind": "fault", "worker": "1.1", "step": 1}, {"time": 0.75, "kind": "generation"}]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_evaluation_batches_are_separate_from_iterations(tmp_path):
    path = run_directory(tmp_path)
    for generation in (0, 1):
        for batch in range(2):
            for worker in SHAPE.workers():
                begin = 50.0 + 10 * generation + batch
                forwards = [(f"{worker.rank}F{worker.pipeline}.{j}", begin + j, begin + j + 0.5) for j in range(2)]
                runs.append_iteration(runs.log_path(path, worker), 1, generation, worker, forwards, batch)
    without = runs.read_logs(run_directory(tmp_path / "without"), SHAPE)
    trace = runs.read_logs(path, SHAPE)
    assert runs.merge_logs(path, SHAPE) == 1
    merged = runs.load_trace(path, SHAPE)
    for read in (trace, merged):
        assert (len(read), read.steps, read.generations_of(1)) == (len(without), [0, 1, 2], [0])
        assert read.period(0, 2) == pytest.approx(without.period(0, 2), abs=1e-8)
        assert read.evaluation(0) is None
        ran = read.evaluation(1)
        assert ran.generation.tolist() == [1] * 16
        assert sorted(zip(ran.batch.tolist(), map(str, map(ran.instruction, range(16))), strict=True)) == sorted(
            (batch, f"{stage}F{pipeline}.{j}")
            for batch in range(2)
            for stage in range(2)
            for pipeline in range(2)
            for j in range(2)
        )
        assert (ran.start.min(), ran.end.max()) == (60.0, 62.5)
    assert run_trace.load_input((path / runs.TRACE).read_bytes(), "trace").schedule.metadata["executed"]["step"] == 1


def test_process_in_another_role_is_not_rerouted(tmp_path):
    trace = runs.read_logs(run_directory(tmp_path), SHAPE).window(2, 2)
    own_rows = trace.process == SHAPE.worker_index(Worker(0, 1))
    assert {str(SHAPE.worker_at(role)) for role in trace.role[own_rows]} == {"1.1"}
    assert set(trace.columns.pipeline[own_rows]) == {1, -1}
    assert not away_from(trace.columns, trace.role // SHAPE.ranks).any()


def test_work_of_another_home_is_rerouted(tmp_path):
    path = runs.log_path(tmp_path, Worker(0, 1))
    runs.append_iteration(path, 4, 2, "0.1", [("1F0.1", 0.0, 1.0), ("1F1.0", 1.0, 2.0), ("1STEP", 2.0, 2.0)])
    trace = runs.read_logs(tmp_path, SHAPE)
    assert away_from(trace.columns, trace.role // SHAPE.ranks).tolist() == [False, True, False]


def test_a_window_keeps_its_steps_and_generation(tmp_path):
    path = runs.log_path(tmp_path, Worker(1, 0))
    for step, generation in ((0, 0), (1, 0), (1, 1), (2, 1)):
        runs.append_iteration(path, step, generation, "1.0", [("0F1.0", float(step), step + 1.0)])
    trace = runs.read_logs(tmp_path, SHAPE)
    assert trace.generations_of(1) == [0, 1]
    assert trace.window(1, 1).generation.tolist() == [0, 1]
    assert trace.period(0, 0) == 1.0
    window = trace.window(1, 2, generation=1)
    assert window.step.tolist() == [1, 2]
    assert window.columns.offsets.tolist() == [0, 0, 0, 2, 2]


def test_period_of_committed_generations(tmp_path):
    """Worker 0.1 runs the same steps two seconds later, so that neighbours overlap; step 1 is tried twice."""
    for worker, late in (("0.0", 0.0), ("0.1", 2.0)):
        path = runs.log_path(tmp_path, Worker.parse(worker))
        for step, generation, start in ((0, 0, 0.0), (1, 0, 2.5), (1, 1, 3.0), (2, 1, 6.0), (3, 1, 9.5)):
            rows = [("0F0.0", start + late, start + late + 1.0), ("0B0.0", start + late + 2.0, start + late + 4.0)]
            runs.append_iteration(path, step, generation, worker, rows)
    trace = runs.read_logs(tmp_path, SHAPE)
    assert trace.period(0, 2) == 3.0
    assert trace.period(2, 3) == 3.5
    assert trace.period(1, 1) == 6.0
    assert trace.period(4, 7) is None


def test_partial_line_is_skipped(tmp_path):
    path = runs.log_path(tmp_path, Worker(0, 0))
    runs.append_iteration(path, 0, 0, "0.0", [("0F0.0", 0.0, 1.0)])
    runs.append_iteration(path, 1, 0, "0.0", [("0F0.1", 1.0, 2.0)])
    for cut in (1, 10, 60):
        content = path.read_bytes()
        path.write_bytes(content[:-cut])
        assert runs.read_logs(tmp_path, SHAPE).steps == ([0, 1] if cut == 1 else [0])
        runs.append_iteration(path, 5, 1, "0.0", [("0F0.0", 2.0, 3.0)])
        assert runs.read_logs(tmp_path, SHAPE).steps == ([0, 1, 5] if cut == 1 else [0, 5])
        path.write_bytes(content)


def test_write_and_read_keep_everything_to_the_nanosecond(tmp_path):
    trace = runs.read_logs(run_directory(tmp_path), SHAPE)
    run_trace.write_parts([trace], trace.shape, trace.events, tmp_path / "trace.json")
    again = run_trace.read_trace(tmp_path / "trace.json")
    assert again.shape == trace.shape
    assert again.columns == trace.columns
    for name in ("role", "generation", "step"):
        assert getattr(again, name).tolist() == getattr(trace, name).tolist()
    assert np.abs(again.start - trace.start).max() <= 0.5e-9 + 1e-15
    assert np.abs(again.end - trace.end).max() <= 0.5e-9 + 1e-15
    assert again.events == trace.events


def test_an_empty_run_directory_gives_an_empty_trace(tmp_path):
    trace = runs.read_logs(tmp_path, SHAPE)
    assert (len(trace), trace.steps, trace.events) == (0, [], ())
    assert (trace.period(0, 9), trace.generations_of(0)) == (None, [])
    run_trace.write_parts([trace], trace.shape, trace.events, tmp_path / "trace.json")
    assert len(run_trace.read_trace(tmp_path / "trace.json")) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"step": 0, "generation": 0, "role": "0.0", "instructions": [["0Q0.0", 0, 1]]}, r"line 1: '0Q0.0' is not an"),
        ({"step": 0, "generation": 0, "role": "9.0", "instructions": []}, r"line 1: role: worker 9.0 is outside"),
        ({"step": 0, "generation": 0, "role": "0.0"}, r"line 1: .*instructions"),
        (
            {"step": 0, "generation": 0, "role": "0.0", "instructions": [["0F0.0", -1e308, 1e308]]},
            r"line 1: Expected `float` >= -1000000000.0 - at `\$\.instructions\[0\]\[1\]`",
        ),
        ({"step": 0, "generation": 0, "role": "0.0", "instructions": [["0F0.0", 0, 1e300]]}, r"line 1: .*<= 10000"),
    ],
)
def test_invalid_line_is_refused_with_its_number(tmp_path, line, message):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0.0.trace.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(RecycleError, match=rf"0\.0\.trace\.jsonl: {message}"):
        runs.read_logs(tmp_path, SHAPE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ('{"traceEvents": [', "not valid JSON"),
        ('{"traceEvents": []}', "is not a trace that recycle wrote"),
        ('{"traceEvents": [], "otherData": {"format": "x", "version": 1, "shape": {}}}', "format"),
        ('{"traceEvents": [], "otherData": {"format": "recycle-trace", "version": 1, "shape": {}}}', "otherData.shape"),
    ],
)
def test_invalid_trace_file_is_refused(tmp_path, text, message):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(RecycleError, match=rf"trace\.json: .*{message}"):
        run_trace.read_trace(tmp_path / "trace.json")
    with pytest.raises(RecycleError, match="cannot be read"):
        run_trace.read_trace(tmp_path / "absent.json")
