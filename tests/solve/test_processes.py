import os
import signal
import threading
import time
from multiprocessing.context import SpawnProcess

import pytest

from recycle import PlanError
from recycle.solve.processes import map_unordered

pytestmark = pytest.mark.process


def square(number):
    if number < 0:
        raise PlanError(f"{number} is negative")
    return number * number, os.getpid()


def end_suddenly(number):
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(path, seconds):
    path.write_text(str(os.getpid()))
    time.sleep(seconds)


def test_all_tasks_are_done_by_the_given_processes():
    results = dict(map_unordered(square, iter([(n,) for n in range(6)]), 2))
    assert {task: result for task, (result, _) in results.items()} == {(n,): n * n for n in range(6)}
    assert 1 <= len({pid for _, pid in results.values()} - {os.getpid()}) <= 2
    assert [pid for _, (_, pid) in map_unordered(square, iter([(3,)]), 1)] == [os.getpid()]


@pytest.mark.parametrize("processes", [1, 2])
def test_recycle_errors_reach_the_caller(processes):
    with pytest.raises(PlanError, match="-3 is negative"):
        list(map_unordered(square, iter([(-3,)]), processes))


def test_killed_process_raises_an_error():
    with pytest.raises(PlanError, match="a planning process ended with -9; is there enough memory for 2 processes"):
        list(map_unordered(end_suddenly, iter([(1,), (2,)]), 2))


def test_closing_early_kills_the_processes(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    begun = time.monotonic()
    results = map_unordered(wait_for, iter([(files[0], 0), (files[1], 60)]), 2)
    next(results)
    while not (files[1].exists() and files[1].read_text()):
        time.sleep(0.01)
    results.close()
    assert time.monotonic() - begun < 30
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_interrupt_during_a_process_start_is_deferred(monkeypatch, capfd):
    """Another thread takes the signal, and Python's handler would run in the main thread amid the start."""
    start, started = SpawnProcess.start, []

    def interrupted(process):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        start(process)
        started.append(process)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    idle = threading.Event()
    other = threading.Thread(target=idle.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(map_unordered(square, iter([(1,), (2,)]), 2))
    finally:
        idle.set()
        other.join()
    assert [process.exitcode for process in started] == [-signal.SIGKILL]
    assert "Traceback" not in capfd.readouterr().err
