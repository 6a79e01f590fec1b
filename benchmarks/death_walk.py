"""The files that take part in a death: code that runs between SIGKILL and the next commit, and not in a calm iteration.

    python benchmarks/death_walk.py [--show] [--deaths N]

Trains an emulated job (D=3 P=2 m=2), kills one worker in the middle of an iteration, and logs every call of a function
of recycle in the launcher and in the survivors. A file counts if at least one of its functions runs after the kill and
before the next commit, and did not run in the four iterations before the kill. `--show` lists the functions. Figures
are medians over runs, because threads differ from run to run. The planner's child, the fork server and the dying worker
do not count.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = "RECYCLE_DEATH_WALK"
"""Environment variable: where the processes of the run log their calls."""
RECYCLE = str(Path(__file__).resolve().parents[1] / "recycle") + os.sep
WINDOW = 0.002
"""Seconds within which further calls of a function are not logged again."""
JOB = """
[shape]
pipelines = 3
ranks = 2
micro_batches = 2
[memory]
limit = 3
[planner]
seconds = 1
[model]
kind = "emulated"
seconds_per_unit = 0.02
[membership]
drift = 0
"""
KILL_STEP, STEPS, VICTIM, CALM = 10, 14, "1.1", 4

Call = tuple[str, str]
"""(file below recycle/, qualified name)."""


def record_calls(folder: str) -> None:
    """Log calls of this process, its threads and its forks, a line each: time, file, function."""
    latest: dict[CodeType, float] = {}

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(RECYCLE):
            return
        code, now = frame.f_code, time.monotonic()
        if now - latest.get(code, 0.0) < WINDOW:
            return
        latest[code] = now
        line = f"{now} {code.co_filename[len(RECYCLE) :]} {code.co_qualname}\n"
        log = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, line.encode())
        os.close(log)  # not kept open: workers close all descriptors that they inherit

    threading.setprofile(record)
    sys.setprofile(record)


def walk(folder: Path, show: bool) -> tuple[int, int, float]:
    """One run: (files, functions, seconds from the kill to the next commit)."""
    from recycle import Job
    from recycle.cli.planner import plan_for_training
    from recycle.exec.launch.launcher import train
    from recycle.exec.launch.trackers import Observer
    from recycle.exec.processes.forkserver import ForkServer

    commits: dict[int, float] = {}
    workers: dict[str, int] = {}
    killed: list[float] = []

    def kill(pid: int) -> None:
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    class Killer(Observer):
        """Kills the victim 30 ms after the commit before `KILL_STEP`."""

        def committed(self, line: dict[str, Any]) -> None:
            commits[line["step"]] = time.monotonic()
            if line["step"] == KILL_STEP - 1:
                workers.update(_worker_processes(folder / "run" / "logs"))
                threading.Timer(0.03, kill, (workers[VICTIM],)).start()

    (folder / "calls").mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        f"import death_walk\ndeath_walk.record_calls({str(folder / 'calls')!r})\n"
    )
    os.environ["PYTHONPATH"] = str(folder)
    server = ForkServer("emulated")
    record_calls(str(folder / "calls"))
    try:
        train(
            Job.from_toml(JOB),
            folder / "run",
            steps=STEPS,
            planner=plan_for_training,
            observer=Killer(),
            server=server,
        )
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        server.close()
        del os.environ["PYTHONPATH"]
    began, ended = killed[0], commits[KILL_STEP]
    calm: set[Call] = set()
    after: set[Call] = set()
    survivors = [os.getpid(), *(pid for worker, pid in workers.items() if worker != VICTIM)]
    for pid in survivors:
        for line in (folder / "calls" / str(pid)).read_text().splitlines():
            when, file, name = line.split(" ", 2)
            if commits[KILL_STEP - 1 - CALM] <= float(when) < began:
                calm.add((file, name))
            elif began <= float(when) <= ended:
                after.add((file, name))
    walked = sorted(after - calm)
    if show:
        for file, name in walked:
            print(f"  {file:<48} {name}")
    return len({file for file, _ in walked}), len(walked), ended - began


def _worker_processes(logs: Path) -> dict[str, int]:
    """Worker -> its process, by the file that its standard output is."""
    processes: dict[str, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            output = Path(os.readlink(f"/proc/{name}/fd/1"))
        except OSError:
            continue
        if output.parent == logs:
            processes[output.stem] = int(name)
    return processes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=3, help="runs, with one death each")
    parser.add_argument("--show", action="store_true", help="list the functions of the last run")
    arguments = parser.parse_args()
    rows: list[tuple[int, int, float]] = []
    for number in range(arguments.deaths):
        with tempfile.TemporaryDirectory(prefix="recycle-walk-") as name:
            rows.append(walk(Path(name), arguments.show and number == arguments.deaths - 1))
    middle: Callable[[int], float] = lambda column: statistics.median(row[column] for row in rows)  # noqa: E731
    print(
        f"a death, from SIGKILL to the next commit, {len(rows)} runs: {middle(0):.0f} files,"
        f" {middle(1):.0f} functions (median), {1000 * middle(2):.0f} ms while every call is logged"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
