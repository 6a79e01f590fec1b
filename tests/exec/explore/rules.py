"""What holds in every run, whatever strikes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from recycle.errors import JobError, RecycleError
from recycle.exec.launch.agent import AgentExit
from recycle.exec.protocol import Committed, Cursor, GenerationRecord, LeaderMessage, Propose
from tests.exec.explore.kernel import Process
from tests.exec.leader.rules import Violation

if TYPE_CHECKING:
    from tests.exec.explore.cluster import Cluster


class Reference(NamedTuple):
    """Lines of metrics, and stage -> digests of its final state, of a run without failures."""

    metrics: Sequence[Mapping[str, Any]]
    digests: Mapping[int, set[str]]


class Rules:
    """Checks one run.

    Attributes:
        struck_nodes: those that a fault has struck.
        committed: last step in the register.
    """

    def __init__(self, cluster: Cluster, reference: Reference) -> None:
        self._cluster, self._reference = cluster, reference
        self.struck_nodes: set[int] = set()
        self._struck: set[Process] = set()
        self._killed: set[Process] = set()
        self.record: GenerationRecord | None = None
        self.cursor: Cursor | None = None
        self.committed = -1
        self._commits: set[tuple[int, int]] = set()
        self._records: dict[int, bytes] = {}

    def _fail(self, rule: str, what: str) -> None:
        if self._cluster.kernel.error is None:
            self._cluster.kernel.error = Violation(rule, what)

    # Processes.

    def struck(self, process: Process) -> None:
        self._struck.add(process)

    def killed(self, process: Process) -> None:
        """An agent ends a process."""
        self._killed.add(process)

    def heard(self, process: Process, message: LeaderMessage) -> None:
        """A process hears something."""
        match message:
            case Committed(generation=generation, commit=commit):
                if (generation, commit.step) not in self._commits and not self._is_begin(generation, commit.step):
                    self._fail(
                        "persist", f"{process.name} hears of {commit.step} of {generation}, which is not written"
                    )
            case Propose(record=record):
                if record.generation not in self._records:
                    self._fail("persist", f"{process.name} hears of {record.generation}, which is not written")

    def _is_begin(self, generation: int, step: int) -> bool:
        return generation in self._records and step <= self.committed

    # The register.

    def written(self, name: str, value: bytes | None) -> None:
        """A key changes."""
        if value is None:
            return
        match name.rpartition("/")[2]:
            case "record":
                self._record(msgspec.msgpack.decode(value, type=GenerationRecord))
            case "cursor":
                self._cursor(msgspec.msgpack.decode(value, type=Cursor))
            case other:
                self._cluster.kernel.log(f"store: {other}")

    def _record(self, record: GenerationRecord) -> None:
        if self.record is not None and record.generation < self.record.generation:
            self._fail("generation", f"{record.generation} follows {self.record.generation}")
        self.record = record
        self._records[record.generation] = b""

    def _cursor(self, cursor: Cursor) -> None:
        before = self.cursor
        if before is not None and cursor.generation < before.generation:
            self._fail("generation", f"cursor of {cursor.generation} follows {before.generation}")
        is_same = before is not None and cursor.generation == before.generation
        # A stage without a live host is restored from a checkpoint, in a new generation.
        if cursor.committed < self.committed and (is_same or self._cluster.scenario.spared):
            self._fail("commit", f"step {cursor.committed} follows {self.committed} in generation {cursor.generation}")
        if cursor.committed > self.committed + 1:
            self._fail("commit", f"step {cursor.committed} follows {self.committed}")
        self.cursor, self.committed = cursor, cursor.committed
        if cursor.commit is not None:
            self._commits.add((cursor.generation, cursor.commit.step))
        self._cluster.kernel.log(f"store: {cursor.phase} generation {cursor.generation}, committed {cursor.committed}")

    # The run directory.

    def wrote(self, line: dict[str, Any]) -> None:
        """A leader writes a line of metrics: each micro-batch counts once, to the last bit."""
        step = line["step"]
        expected = self._reference.metrics[step]
        for key in ("loss", "grad_norm"):
            if line[key] != expected[key]:
                self._fail("bits", f"{key} of step {step} is {line[key]}, without failures {expected[key]}")

    def logged(self, event: dict[str, Any]) -> None:
        """A leader writes an event."""
        cluster = self._cluster
        if event["kind"] == "detected" and cluster.scenario.slow_messages == 0.0 and not cluster.scenario.crashes:
            worker = event["worker"]
            node = next(node for at, node in cluster.homes.items() if str(at) == worker)
            struck = {process.name.split()[1].rpartition(".")[0] for process in self._struck if " " in process.name}
            if node not in self.struck_nodes and worker not in struck and not self._is_another(event["cause"]):
                self._fail("fence", f"worker {worker}, which is well: {event['cause']}")

    def _is_another(self, cause: str) -> bool:
        """Whether a cause may lie elsewhere."""
        # Of workers that fail to form together any may be to blame; an agent without a leader waits for the store.
        is_store = any("store" in fault.kind or "lose" in fault.kind for fault in self._cluster.scenario.faults)
        return bool(re.search("could not form|ended while no agent led the run", cause)) or (
            is_store and cause.startswith("the agent of node")
        )

    # The end.

    def exited(self, node: int, exit: AgentExit | RecycleError) -> None:
        """An agent has ended."""
        if isinstance(exit, JobError) and "already has an agent" not in str(exit):
            self._fail("refused", f"agent {node}: {exit}")
        if (
            isinstance(exit, RecycleError)
            and self._cluster.scenario.spared
            and not re.search("does not answer|during start-up|has ended while", str(exit))
        ):
            self._fail("progress", f"agent {node}: {exit}")

    def ended(self) -> None:
        """The run is over."""
        cluster = self._cluster
        exits = [exit for of_node in cluster.exits.values() for exit in of_node]
        if AgentExit.DONE not in exits:
            return
        steps = cluster.scenario.steps
        lines = [json.loads(line) for line in (cluster.path / "metrics.jsonl").read_text().splitlines()]
        written = [line["step"] for line in lines]
        may_lack = any(fault.kind == "fill disk" for fault in cluster.scenario.faults)
        if written != list(range(steps)) and not (may_lack and written == sorted(set(written))):
            raise Violation("line", f"metrics has steps {written}, not {steps}")
        expected = self._reference.digests
        events = [json.loads(line) for line in (cluster.path / "events.jsonl").read_text().splitlines()]
        for event in events:
            for worker, digests in event.get("digests", {}).items() if event["kind"] == "finished" else ():
                for stage, digest in digests.items():
                    if digest not in expected[int(stage)]:
                        raise Violation("bits", f"the final state of stage {stage} of worker {worker}")
