"""Agents as separate processes, each with its own address, on this machine or in separate network namespaces.

A run goes slowly until `finish`, so that it lasts as long as a test has something to wait for or to strike.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from recycle import Job
from recycle.exec.launch.launcher import RunResult
from tests import ROOT
from tests.exec.etcd_server import EtcdServer
from tests.exec.network import Node
from tests.exec.paced import SLOWLY
from tests.exec.runs import events_of, lines_of
from tests.warm import WarmProcess, start_recycle

COMMAND = [sys.executable, "-c", "from recycle.cli import main; main()", "agent"]
PATIENCE = 120.0
LOOPBACK = [Node(f"127.0.0.{number + 2}") for number in range(4)]


class Cluster:
    """The agents of one run.

    Args:
        directory: for the job, the agents' output and the run directory `run`.
        job: with the transport of `tests.exec.paced`.
        name: of the run in the store.
        nodes: where the agents run; on loopback addresses when left out.
    """

    def __init__(
        self, directory: Path, job: Job, server: EtcdServer, name: str, *options: str, nodes: Sequence[Node] = LOOPBACK
    ):
        self._directory, self._server, self._name, self._options = directory, server, name, options
        self._nodes = nodes
        (directory / "job.toml").write_text(job.to_toml())
        (directory / SLOWLY).touch()
        self.agents = {}

    def start(self, node: int, *more: str, as_user=False) -> subprocess.Popen[bytes] | WarmProcess:
        """Start the agent of a node.

        Args:
            more: options for this start only.
            as_user: as users start it; else it is forked from a process that has imported torch, and what it starts as
                well, where the node has no network namespace.
        """
        place = self._nodes[node]
        options = (
            *("job.toml", "--store", self._server.url, "--node", str(node), "--address", place.address),
            *("--id", self._name, "--run", "run", *self._options, *more),
        )
        with self.output(node).open("ab") as output:
            if as_user or place.namespace is not None:
                self.agents[node] = subprocess.Popen(
                    place.command(*COMMAND, *options),
                    cwd=self._directory,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},  # to find the transport of `tests.exec.paced`
                    stdout=output,
                    stderr=output,
                )
            else:
                self.agents[node] = start_recycle(["agent", *options], self._directory, output)
        return self.agents[node]

    def output(self, node: int) -> Path:
        return self._directory / f"agent{node}.out"

    def lines(self, name: str):
        """Lines of `metrics` or `events` so far."""
        return lines_of(self._directory / "run", name)

    def events(self, kind: str):
        return events_of(self._directory / "run", kind)

    def reach(self, condition: Callable[[], bool], what: str):
        """Wait for something to have happened."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            messages = {node: self.output(node).read_text()[-600:] for node in self.agents}
            assert time.monotonic() < deadline, f"{what} did not happen; {self.lines('events')[-3:]}; {messages}"
            ended = [node for node, agent in self.agents.items() if agent.poll() not in (None, 0, -signal.SIGKILL)]
            assert not ended, f"agents {ended} ended before {what}; {messages}"
            time.sleep(0.05)

    def reach_step(self, step: int):
        self.reach(lambda: len(self.lines("metrics")) > step, f"step {step}")

    def slow_down(self, seconds: float):
        """Let every iteration begin with such a pause, while a test awaits something slow."""
        (self._directory / SLOWLY).write_text(f"{seconds}")

    def coordinator(self) -> int:
        """The node whose agent has said that a step was committed, last of all."""
        messages = {node: self.output(node).read_text().rpartition("\nstep ")[2].split("/")[0] for node in self.agents}
        return max((int(text), node) for node, text in messages.items() if text.strip().isdigit())[1]

    def assert_trained_as(self, calm: RunResult):
        """Every step once, with the losses and at the end the states of a calm run on one machine, to the last bit."""
        metrics, final = self.lines("metrics"), self.events("finished")[-1]["digests"]
        assert [line["step"] for line in metrics] == list(range(len(calm.losses)))
        assert [line["loss"] for line in metrics] == calm.losses
        assert {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line} == calm.evaluations
        assert final
        assert final == {
            worker: {str(stage): digest for stage, digest in calm.digests[worker].items()} for worker in final
        }

    def kill(self, node: int):
        self.agents[node].kill()
        self.agents[node].wait()

    def reach_end(self, node: int, code: int):
        """Wait until an agent has ended, with this exit code."""
        ended = self.agents.pop(node).wait(PATIENCE)
        assert ended == code, f"agent {node}: {ended}; {self.output(node).read_text()[-2000:]}"

    def finish(self):
        """Let the run go at full speed, and wait until every agent that was not killed has ended well."""
        (self._directory / SLOWLY).unlink()
        for node, agent in self.agents.items():
            code = agent.wait(PATIENCE)
            assert code in (0, -signal.SIGKILL), f"agent {node}: {code}; {self.output(node).read_text()[-2000:]}"

    def end(self):
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGCONT)
                agent.kill()
                agent.wait()
