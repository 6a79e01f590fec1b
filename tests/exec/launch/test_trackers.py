"""Experiment trackers show what the run directory says, and their failures do not end the run."""

import json
import struct
import threading
from pathlib import Path

import pytest

from recycle import Job, JobError
from recycle.exec.launch.trackers import TensorBoard, Trackers
from tests.exec.runs import job, require_startable

pytest.importorskip("tensorboard")
LINE = {"step": 0, "loss": 2.5, "grad_norm": 1.0, "tokens_per_second": 512.0, "live_workers": 4, "period_error": None}


def shown(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(folder))
    result.Reload()
    return result


def curve(result, name: str) -> dict[int, float]:
    return {event.step: event.value for event in result.Scalars(name)}


def notes(result) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in result.Tensors("events/text_summary")]


def test_tensorboard_shows_every_step_and_what_happened(tmp_path):
    config = job(2, 2, 2, kind="emulated", logging={"tensorboard": True})
    shows = Trackers(config, tmp_path, 0, lambda _: None)
    lines = [LINE | {"step": step, "loss": 2.5 - step, "live_workers": 4 - (step > 1)} for step in range(4)]
    for line in lines:
        shows.committed(line | ({"eval_loss": 3.0} if line["step"] % 2 else {}))
    shows.event({"kind": "detected", "time": 1.0, "worker": "1.1", "step": 2, "cause": "killed by SIGKILL"})
    shows.event({"kind": "recovered", "time": 1.5, "step": 2, "seconds": 0.5, "generation": 3})
    shows.close()
    result = shown(tmp_path / "tensorboard")
    for name in ("loss", "live_workers"):
        assert curve(result, name) == {line["step"]: line[name] for line in lines}
    assert curve(result, "eval_loss") == {1: 3.0, 3: 3.0}
    assert curve(result, "learning_rate")[0] == pytest.approx(config.train.learning_rate / config.train.warmup)
    assert any("worker 1.1 is dead: killed by SIGKILL" in note for note in notes(result))
    assert any("recovered in 500 ms" in note for note in notes(result))


def trackers(folder: Path, warned: list[str], first=0, **section) -> Trackers:
    return Trackers(job(2, 2, 2, logging={"tensorboard": True, **section}), folder, first, warned.append)


def test_steps_that_are_trained_again_replace_those_before(tmp_path):
    config = trackers(tmp_path, warned := [])
    for step in (0, 1, 2, 3, 1, 2):
        config.committed(LINE | {"step": step, "loss": float(step)})
    config.close()
    again = trackers(tmp_path, warned, first=2)
    again.committed(LINE | {"step": 2, "loss": 20.0})
    again.close()
    result = shown(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in result.Scalars("loss")] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert not warned


def test_the_share_of_the_peak_is_that_of_the_models_operations(tmp_path):
    config = job(
        1,
        1,
        1,
        kind="gpt",
        logging={"tensorboard": True, "peak_flops": 1e9},
        model={"layers": 2, "hidden": 8, "sequence": 4},
    )
    b, s, h, v = 1, 4, 8, config.model.vocabulary
    operations = 3 * (2 * (b * s * 24 * h * h + 4 * b * s * s * h) + 2 * b * s * h * v)
    shows = Trackers(config, tmp_path, 0, lambda _: None)
    shows.committed(LINE | {"tokens_per_second": 4.0, "live_workers": 1})  # an iteration of a second
    shows.close()
    assert curve(shown(tmp_path / "tensorboard"), "mfu") == pytest.approx({0: operations / 1e9}, rel=1e-5)


def test_tracker_that_fails_is_disabled_with_one_warning(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, "step", full)
    config = trackers(tmp_path, warned := [])
    for step in range(50):
        config.committed(LINE | {"step": step})
        config._thread.submit(lambda: None).result()
    config.close()
    assert warned == ["TensorBoard is disabled for the rest of this run: OSError: No space left on device"]


def test_tracker_that_hangs_ends_no_run_and_delays_its_end_a_while_only(tmp_path, monkeypatch):
    monkeypatch.setattr(TensorBoard, "step", lambda *_: threading.Event().wait())
    monkeypatch.setattr("recycle.exec.launch.trackers.CLOSING_SECONDS", 0.5)
    config = trackers(tmp_path, warned := [])
    config.committed(LINE)
    config.close()
    assert warned == ["TensorBoard: the last values were not written within 0.5 s"]


@pytest.mark.soak
@pytest.mark.process
def test_weights_and_biases_has_the_run_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    warned = []
    config = Trackers(job(2, 2, 2, logging={"wandb": "recycle", "wandb_mode": "offline"}), tmp_path, 0, warned.append)
    for step in range(3):
        config.committed(LINE | {"step": step, "loss": 10.0 + step})
    config.event({"kind": "detected", "time": 1.0, "worker": "1.1", "step": 3, "cause": "killed by SIGKILL"})
    config.close()
    assert not warned
    (stored,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert [line["loss"] for line in logged(stored) if "loss" in line] == [10.0, 11.0, 12.0]
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/events_*.table.json")
    assert json.loads(table.read_text())["data"] == [
        [2, "worker 1.1 is dead: killed by SIGKILL; step 3 starts again without it"]
    ]


def logged(stored: Path):
    """What was logged, from the file that `wandb sync` uploads: a header of 7 bytes, then LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    content, place, whole, result = stored.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # what is left of a block holds no header
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            if record.HasField("history"):
                items = record.history.item
                result.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return result


def test_a_missing_package_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(JobError, match=r"\[logging\] wandb: needs a package; install it with: pip install"):
        require_startable(job(2, 2, 2, kind="emulated", logging={"wandb": "x"}))


def test_former_name_of_the_section_is_read_with_a_notice(tmp_path):
    path, shape = tmp_path / "job.toml", "[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n"
    path.write_text(f"{shape}[dials]\ntensorboard = true\n")
    with pytest.warns(FutureWarning, match=r"job.toml: \[dials\] is now named \[logging\]"):
        assert Job.load(path).logging.tensorboard
    path.write_text(f"{shape}[dials]\n[logging]\n")
    with pytest.warns(FutureWarning), pytest.raises(JobError, match=r"write \[logging\] only"):
        Job.load(path)
