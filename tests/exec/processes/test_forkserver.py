"""A fork server forks workers and keeps the id and the exit code of each until it is reaped."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from recycle import RunError
from recycle.exec.processes.forkserver import ForkServer, WorkerProcess
from tests.waiting import until

pytestmark = pytest.mark.process


def wait_until_forked(server: ForkServer, process: WorkerProcess):
    until(lambda: server.read_answers() or process.pid != 0)


def wait_for_code(server: ForkServer, process: WorkerProcess) -> int | None:
    wait_until_forked(server, process)
    until(lambda: process.poll() or process.code is not None)
    return process.code


@pytest.fixture
def server():
    server = ForkServer("emulated")
    yield server
    server.close()


def test_an_ended_process_keeps_its_id_and_its_exit_code_until_it_is_reaped(server, tmp_path):
    process = server.fork("no specification", tmp_path / "worker.log")
    assert wait_for_code(server, process) == 1
    os.kill(process.pid, 0)
    server.reap(process)
    until(lambda: not Path(f"/proc/{process.pid}").exists())


def test_stopped_server_does_not_block_its_caller(server, tmp_path):
    os.kill(server.pid, signal.SIGSTOP)
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    processes = [server.fork("x" * 40_000, log) for log in logs]  # more than a pipe holds
    server.read_answers()
    assert [process.pid for process in processes] == [0, 0, 0]
    os.kill(server.pid, signal.SIGCONT)
    assert [wait_for_code(server, process) for process in processes] == [1, 1, 1]
    assert all("DecodeError" in log.read_text() for log in logs)


def test_a_worker_waits_until_other_processes_have_ended(server, tmp_path):
    log = tmp_path / "worker.log"
    others = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    process = server.fork("no specification", log, [WorkerProcess(other.pid) for other in others])
    wait_until_forked(server, process)
    for other in others:
        time.sleep(0.1)
        assert not log.exists()
        other.kill()
    assert wait_for_code(server, process) == 1
    assert "DecodeError" in log.read_text()
    for other in others:
        other.wait()


def test_a_call_gives_the_exit_code_and_the_output_of_a_process_of_its_own(server):
    large = "x" * 200_000  # more than a pipe holds
    assert server.call("builtins:print", large) == (0, large + "\n")
    assert server.call("builtins:int", "no number")[0] == 1
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="the fork server was killed by SIGKILL"):
        server.call("builtins:print", "")


def test_a_users_modules_are_imported_once_by_the_server_and_by_no_worker(tmp_path):
    trace = tmp_path / "imported"
    (tmp_path / "of_a_user.py").write_text(f"import os\nopen({str(trace)!r}, 'a').write(f'{{os.getpid()}} ')\n")
    server = ForkServer("emulated", modules=["of_a_user"], folders=[str(tmp_path)])
    try:
        assert wait_for_code(server, server.fork("no specification", tmp_path / "worker.log")) == 1
        assert trace.read_text().split() == [str(server.pid)]
    finally:
        server.close()


@pytest.mark.parametrize("engine", ["", "transformer_engine.py"])
def test_processes_run_python_anew_where_an_import_has_started_threads(tmp_path, engine):
    """As CUDA does: a process forked from a server with threads could not compute."""
    wait = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "threaded.py").write_text(f"import os, threading\nos.environ['SERVER'] = str(os.getpid())\n{wait}\n")
    program = (
        "import os\ndef run(text):\n    print(text, os.environ.get('SERVER'), len(os.listdir('/proc/self/task')))\n"
    )
    (tmp_path / "program.py").write_text(program)
    if engine:  # then the server imports no modules, as they may start CUDA
        (tmp_path / engine).touch()
    server = ForkServer("emulated", modules=["threaded"], folders=[str(tmp_path)])
    try:
        process = server.fork("an argument", tmp_path / "worker.log", function="program:run")
        assert wait_for_code(server, process) == 0
        assert (tmp_path / "worker.log").read_text() == f"an argument {None if engine else server.pid} 1\n"
    finally:
        server.close()
