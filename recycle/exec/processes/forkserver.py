"""A process that imports the heavy packages once and forks the workers off.

Importing megatron-core costs seconds of CPU per process; forked, a worker is up in a fraction of one, at the start of
a run and when it re-joins. Requests come as JSON lines on standard input, answers go as JSON lines to standard
output: `{"id": 3, "pid": 7}` when a worker is forked, `{"id": 3, "status": -9}` when it has ended.

It must have a single thread when it forks (torch starts its threads on first use, not on import); that is checked.
It dies with the launcher, and each worker with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from recycle.child import die_with_parent, serve

PRELOADED = {
    **dict.fromkeys(
        ("gpt", "llama", "qwen", "mixtral"),
        (
            "recycle.exec.model.gpt",
            "recycle.exec.model.part",
            "recycle.exec.model.parallel_state",
            "recycle.exec.model.backward",
        ),
    ),
    "emulated": (),
    "checkpoints": (
        "torch.distributed.checkpoint.hf_storage",
        "torch.distributed.checkpoint.state_dict_saver",
        "torch.distributed.checkpoint.state_dict_loader",
        "safetensors.torch",
    ),
}
"""Modules to import before forking: by the job's kind of model, and for a run that keeps checkpoints."""


def main(launcher: str, folders: str, *modules: str) -> None:
    """Serve until standard input ends.

    Args:
        folders: to look for modules in before Python's own path, as PYTHONPATH has them.
        modules: to import before forking, beside the worker's.
    """
    _, answers = serve(launcher)
    sys.path[:0] = filter(None, folders.split(os.pathsep))
    for module in ("recycle.exec.worker.worker", *modules):
        importlib.import_module(module)
    importlib.import_module("recycle.ir.plugins").load_plugins()
    importlib.import_module("recycle.exec.worker.warm_up").warm_up()
    gc.collect()
    gc.freeze()  # what is imported stays, so that no worker's collector looks at it, and so copies its pages
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(f"forkserver: {threads} threads after the imports; forking would not be safe")
    requests, pending = 0, b""
    running: dict[int, tuple[int, int]] = {}  # descriptor of a worker's process -> its request and its process id
    while True:
        readable, _, _ = select.select([requests, *running], [], [])
        for descriptor in running.keys() & set(readable):
            number, pid = running.pop(descriptor)
            os.close(descriptor)
            _answer(answers, id=number, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if requests in readable:
            chunk = os.read(requests, 1 << 20)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for request in map(json.loads, lines):
                pid = _fork(request)
                running[os.pidfd_open(pid)] = request["id"], pid
                _answer(answers, id=request["id"], pid=pid)


def _answer(answers: BinaryIO, **fields: int) -> None:
    answers.write(json.dumps(fields).encode() + b"\n")


def _fork(request: dict[str, Any]) -> int:
    """The id of the process that becomes the worker, and does not return from here."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _become_worker(Path(request["log"]), parent)
        from recycle.exec.worker.worker import run_worker

        run_worker(request["specification"])
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_worker(log: Path, parent: int) -> None:
    """A session and a log of its own, and none of the server's descriptors."""
    die_with_parent(parent)
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


if __name__ == "__main__":
    main(*sys.argv[1:])
