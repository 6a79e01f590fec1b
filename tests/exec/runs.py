"""Jobs for runs with real worker processes, and what to look at afterwards."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from recycle.exec.launch.checks import check_request
from recycle.exec.launch.launcher import RunResult
from recycle.exec.launch.standalone import LocalRun
from recycle.ir.families import looped_bfs, one_f_one_b
from recycle.ir.lower import with_barrier
from recycle.job import Job, PricedJob, price
from recycle.job.job import toml_value
from recycle.plans.plan import with_updates_of
from tests.jobs import varied
from tests.waiting import until

Run = Callable[..., RunResult]


def job(pipelines: int, ranks: int, micro_batches: int, kind="emulated", **sections) -> PricedJob:
    """A job of the given shape; sections add or replace keys."""
    keys = {
        "shape": {"pipelines": pipelines, "ranks": ranks, "micro_batches": micro_batches},
        "memory": {"limit": ranks + 1},
        "planner": {"seconds": 1.0},
        "model": {"kind": kind, "layers": 2 * ranks, "hidden": 32, "heads": 2, "sequence": 16},
        "train": {"warmup": 2},
        # A machine with too much to do looks like slow or hung workers; test_replanning.py has the former.
        "membership": {"drift": 0.0, "hung_after": 20.0},
    }
    for section, values in sections.items():
        keys.setdefault(section, {}).update(values)
    lines = []
    for section, values in keys.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
    return price(Job.from_toml("\n".join(lines)))


def require_startable(config: Job, steps=1):
    """Check the request of a run without faults, as is done before it starts. Raises JobError."""
    check_request(config, steps, (), frozenset())


def lines_of(directory: Path, name: str):
    """Lines of a run directory's `metrics` or `events` so far."""
    path = directory / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events_of(directory: Path, kind: str):
    """Events of a kind in a run directory."""
    return [event for event in lines_of(directory, "events") if event["kind"] == kind]


def kinds(result: RunResult) -> list[str]:
    """Kinds of the run's events, in order."""
    return [event["kind"] for event in result.events]


def of_kind(result: RunResult, kind: str):
    """The run's events of a kind."""
    return [event for event in result.events if event["kind"] == kind]


def only(result: RunResult, kind: str):
    """The run's only event of a kind."""
    (event,) = of_kind(result, kind)
    return event


def figures(result: RunResult) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of all iterations."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in result.metrics]


def assert_same_training(run: RunResult, reference: RunResult):
    """Every loss, also of evaluations, and norm, and the final state of every worker that lives, to the last bit."""
    assert figures(run) == figures(reference)
    assert run.evaluations == reference.evaluations
    assert run.digests
    for worker, stages in run.digests.items():
        assert stages == reference.digests[worker]


def deaths(result: RunResult) -> list[tuple[str, str]]:
    """(worker, cause) of every death that was detected."""
    return [(event["worker"], event["cause"]) for event in of_kind(result, "detected")]


def live_workers(result: RunResult) -> list[int]:
    """How many workers each iteration had."""
    return [line["live_workers"] for line in result.metrics]


_CALM = {}


def local_run(config: PricedJob) -> LocalRun:
    """All workers of a job in this process, without faults."""
    schedule = (one_f_one_b if config.shape.chunks == 1 else looped_bfs)(config.shape)
    return LocalRun(with_barrier(with_updates_of(schedule, config)), varied(config, model={"seconds_per_unit": 0.0}))


def calm_run(config: PricedJob, launch: Run, steps: int, in_processes=False) -> RunResult:
    """The run without faults, shared by all tests that train the same job.

    It is a `local_run`, unless the directory of one `in_processes` is asked for or workers are several processes each.
    """
    in_processes |= config.grid.tensor_parallel > 1
    key = config.to_toml(), steps, in_processes
    if key not in _CALM:
        _CALM[key] = launch(config, steps) if in_processes else local_run(config).run(steps)
    return _CALM[key]


def shared_memory() -> set[str]:
    """Names of tensors, semaphores and buffers in shared memory. Files of other tests have other names."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "psm_", "sem.", "nccl", "pymp"))}


def await_release(before: set[str]):
    """Wait until what has come into shared memory since then is gone; semaphores of other tests go when these end."""
    new = shared_memory() - before
    until(lambda: not new & shared_memory())


def processes_writing_below(path: str) -> list[int]:
    """Processes whose standard output is a file below `path`."""
    result = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/fd/1").startswith(path):
                result.append(int(pid))
        except OSError:
            continue
    return result


def listening(pid: int | str) -> set[tuple[str, int]]:
    """Addresses and TCP ports on which a process listens, as the kernel has them."""
    sockets = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                sockets.add(os.readlink(entry.path))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    places = (row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets)
    return {(".".join(map(str, bytes.fromhex(address)[::-1])), int(port, 16)) for address, port in places}


def heavy_libraries(pid: int) -> set[str]:
    """Which of the libraries that agent and leader do without a process has loaded."""
    loaded = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in ("torch", "llvmlite", "mip", "highs", "pandas") if f"/site-packages/{name}" in loaded}
