"""Job, profile and trace files that mean harm: each is read, or refused in one line that names the file."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from recycle import Job, JobError, Profile, RecycleError, Shape, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.ir.formats import run_trace
from recycle.job.reference import explain_job
from recycle.runs import logs as runs
from tests.hostile import any_bytes, mutated, read_or_refused, restructured, retold

quick = settings(max_examples=80, suppress_health_check=[*HealthCheck])
SCHEDULE = lower(one_f_one_b(Shape(1, 2, 2)))


@dataclass
class Reader:
    """One kind of file: its reader, the error of a refusal, a use of the result, and valid files."""

    read: Callable[[Path], Any]
    refusal: type[RecycleError]
    use: Callable[[Any], object]
    seeds: list[bytes]


def use_job(job: Job):
    with contextlib.suppress(JobError):
        job.profile()
        job.activation_limits()
        job.layers_per_stage()
    assert Job.from_toml(explain_job(job)) == Job.from_toml(job.to_toml()) == job


def use_profile(profile: Profile):
    assert len(profile.digest()) == 16
    with contextlib.suppress(JobError):
        assert simulate(SCHEDULE, profile).makespan >= 0


def trace_file(folder: Path) -> bytes:
    timeline = simulate(SCHEDULE)
    for worker in SCHEDULE.shape.workers():
        rows = range(*SCHEDULE.columns.offsets[SCHEDULE.shape.worker_index(worker) :][:2].tolist())
        ran = [(SCHEDULE.instruction(row), float(timeline.start[row]), float(timeline.end[row])) for row in rows]
        runs.append_iteration(runs.log_path(folder, worker), 0, 0, worker, ran)
    (folder / "events.jsonl").write_text('{"time": 0.5, "kind": "fault", "worker": "0.1", "step": 0}\n')
    runs.merge_logs(folder, SCHEDULE.shape)
    return (folder / "trace.json").read_bytes()


GRID = b"[shape]\npipelines = 2\nranks = 2\nmicro_batches = 3\n"
JOBS = [
    GRID + b"[times]\nforward = [1.0, 2.0]\nlink = 0.5\n[memory]\nlimit = [3, 4]\n",
    Job.from_toml(GRID.decode()).to_toml().encode(),
]
PROFILES = [
    json.dumps(profile.to_json()).encode()
    for profile in (Profile(), Profile([1.0, 2.0], overlapped_pair=2.0, bandwidth=3.0, speed={"0.0": 2.0}))
]


@pytest.fixture(scope="module", params=["job", "profile", "trace"])
def reader(request, tmp_path_factory):
    if request.param == "job":
        return Reader(Job.load, JobError, use_job, JOBS)
    if request.param == "profile":
        return Reader(Profile.load, JobError, use_profile, PROFILES)
    return Reader(run_trace.read_trace, RecycleError, len, [trace_file(tmp_path_factory.mktemp("run"))])


def survives(reader: Reader, file: Path, content: bytes):
    file.write_bytes(content)
    value = read_or_refused(lambda: reader.read(file), reader.refusal, str(file))
    if value is not None:
        reader.use(value)


def test_the_seeds_are_read(reader, tmp_path):
    for seed in reader.seeds:
        (tmp_path / "file").write_bytes(seed)
        reader.use(reader.read(tmp_path / "file"))


@pytest.mark.parametrize("spoil", [lambda _: any_bytes(), mutated, retold], ids=["bytes", "mutated", "retold"])
@quick
@given(data=st.data())
def test_a_spoiled_file_is_read_or_refused(reader, tmp_path, spoil, data):
    survives(reader, tmp_path / "file", data.draw(spoil(reader.seeds)))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # 1e308 seconds twice is a valid answer: infinitely long
@pytest.mark.parametrize("reader", ["profile", "trace"], indirect=True)
@quick
@given(data=st.data())
def test_a_file_with_values_of_other_kinds_is_read_or_refused(reader, tmp_path, data):
    documents = [json.loads(seed) for seed in reader.seeds]
    survives(reader, tmp_path / "file", json.dumps(data.draw(restructured(documents))).encode())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[times]\nlink = inf\n", r"\[times\] link: must be finite"),
        ("[times]\nlink = nan\n", r"\[times\] link: expected `float` >= 0.0"),
        (f"[times]\nforward = {'9' * 400}\n", r"\[times\] forward: number out of range"),
        (f"[times]\nforward = {'9' * 5000}\n", "not valid TOML: Exceeds the limit"),
        (f"[memory]\nlimit = {'9' * 400}\n", r"\[memory\] limit: at most 2147483648 activations"),
        (f"a = {'[' * 100_000}", "not valid TOML: maximum recursion depth"),
        ("[shape]\nranks = 3\n", "not valid TOML: Cannot declare"),
        ('[data]\npath = "\\ud800"\n', "not valid TOML"),
    ],
)
def test_a_job_that_no_machine_could_run_is_refused(text, complaint):
    with pytest.raises(JobError, match=f"job.toml: {complaint}"):
        Job.from_toml(GRID.decode() + text, "job.toml")


def test_duplicate_key_of_a_profile_is_refused(tmp_path):
    (tmp_path / "p.json").write_text('{"forward": 1, "forward": 2}')
    with pytest.raises(JobError, match=r"p\.json: 'forward' is there twice"):
        Profile.load(tmp_path / "p.json")
