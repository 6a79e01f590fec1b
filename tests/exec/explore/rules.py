"""What holds in every run, whatever strikes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from recycle.errors import JobError, RecycleError
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.agent import AgentExit
from recycle.exec.members import members_of
from recycle.exec.protocol import (
    Acknowledged,
    Committed,
    Cursor,
    Evaluated,
    EvaluationResult,
    Formed,
    GenerationRecord,
    LeaderMessage,
    Permit,
    Propose,
    StepReport,
    Strike,
    WorkerMessage,
)
from recycle.job.shape import Worker
from tests.exec.explore.kernel import Process

if TYPE_CHECKING:
    from tests.exec.explore.cluster import Cluster

CALM_FAULTS = {"leave worker", "drain worker"}
"""Faults that cost no iteration."""
CHECKPOINT_ERRORS = "no space|No space|is still being written|ended before it had written|within"
"""Why a checkpoint may be incomplete."""


class Violation(Exception):
    """A rule is violated.

    Args:
        rule: its name.
        what: what happened.
    """

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class Reference(NamedTuple):
    """Lines of metrics, and stage or shard -> digests of its final state, of a run without failures."""

    metrics: Sequence[Mapping[str, Any]]
    digests: Mapping[int, set[str]]


class Rules:
    """Checks one run.

    Attributes:
        reference: what the run should compute, if known.
        result: what it has computed; complete when it has ended.
        struck_nodes, struck_workers: those that a fault has struck.
        committed: last step in the register.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.reference: Reference | None = None
        self.result = Reference([], {})
        crashing = {name.removesuffix(" writes") for name, _ in cluster.scenario.crashes}
        self.struck_nodes = {node for node in set(cluster.homes.values()) if f"agent {node}" in crashing}
        self.struck_workers = {parse_fault(text).worker for text in cluster.scenario.planned}
        self.struck_workers |= {w for w in cluster.homes if any(name.startswith(f"worker {w}") for name in crashing)}
        self._leader: Process | None = None
        self.record: GenerationRecord | None = None
        self.cursor: Cursor | None = None
        self.committed = -1
        self._commits: set[tuple[int, int]] = set()
        self._evaluated: list[Evaluated | None] = []
        self._records, self._ran = set[int](), set[int]()
        self._said: dict[tuple[int, str], set[str]] = defaultdict(set)

    def _fail(self, rule: str, what: str) -> None:
        if self._cluster.kernel.error is None:
            self._cluster.kernel.error = Violation(rule, what)

    # Processes.

    def struck(self, process: Process) -> None:
        if process.worker is not None:
            self.struck_workers.add(process.worker)

    def left(self, process: Process) -> None:
        """A worker's process ends by itself."""
        record, cursor, worker = self.record, self.cursor, process.worker
        if worker is None or record is None or cursor is None or str(worker) not in record.live:
            return
        is_over = cursor.commit is not None and cursor.commit.finished
        if not is_over and not self._cluster.scenario.elastic:
            peers = (Worker.parse(name) for name in record.live if name not in (str(worker), *record.joins))
            if not any(peer.rank == worker.rank for peer in peers):
                self._fail("last copy", f"{process.name} leaves, and nobody has the state of its stage")

    def said(self, member: str, generation: int, message: WorkerMessage) -> None:
        """A process says something."""
        match message:
            case StepReport(step=step, report=report):
                self._said[generation, f"{type(report).__name__} {step}"].add(member)
            case Acknowledged() | Formed(error=""):
                self._said[generation, "form" if isinstance(message, Acknowledged) else "run"].add(member)

    def _require_said(self, rule: str, record: GenerationRecord, what: str) -> None:
        members = set(members_of(record.live, self._cluster.scenario.tensor_parallel))
        if missing := members - self._said[record.generation, what]:
            self._fail(rule, f"generation {record.generation} goes on without {what} of {sorted(missing)}")

    def heard(self, process: Process, message: LeaderMessage) -> None:
        """A process hears something."""
        record, cursor = self.record, self.cursor
        match message:
            case Permit(generation=generation, what=what) if record is not None and record.generation == generation:
                self._require_said("permit", record, what)
                if what == "run" and generation not in self._ran:
                    self._fail("persist", f"{process.name} hears that {generation} runs, which is not written")
            case Strike(fault=fault) if cursor is not None and fault not in cursor.struck:
                self._fail("persist", f"{process.name} is struck by {fault}, which is not written")
            case EvaluationResult(generation=generation, evaluated=evaluated) if cursor is not None:
                if cursor.generation == generation and evaluated not in self._evaluated:
                    self._fail("persist", f"{process.name} hears of {evaluated}, which is not written")
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

    def written(self, name: str, value: bytes | None, writer: Process | None) -> None:
        """A key changes; `writer` has asked for it."""
        key = name.rpartition("/")[2]
        if key == "role":
            self._leader = None if value is None else writer
        if value is None:
            return
        if key in ("record", "cursor", "outcome") and writer is not self._leader:
            self._fail("leader", f"{writer and writer.name} writes {key}, and is not the leader")
        match key:
            case "record":
                self._record(msgspec.msgpack.decode(value, type=GenerationRecord))
            case "cursor":
                self._cursor(msgspec.msgpack.decode(value, type=Cursor))
            case other:
                self._cluster.kernel.log(f"store: {other}")

    def _record(self, record: GenerationRecord) -> None:
        before = self.record
        if before is not None and record.generation < before.generation:
            self._fail("generation", f"{record.generation} follows {before.generation}")
        if (before is None or record.generation > before.generation) and record.mode != "barrier":
            self._fail("mode", f"generation {record.generation} begins with a {record.mode} step")
        self.record = record
        self._records.add(record.generation)

        scenario = self._cluster.scenario
        is_next = before is not None and record.generation > before.generation and self._ran
        if is_next and scenario.are_only_roles and not (scenario.elastic or scenario.slow_messages):
            self._fail("take-over", f"generation {record.generation} follows one that runs")

    def _cursor(self, cursor: Cursor) -> None:
        before = self.cursor
        if before is not None and cursor.generation < before.generation:
            self._fail("generation", f"cursor of {cursor.generation} follows {before.generation}")
        is_same = before is not None and cursor.generation == before.generation
        # A stage without a live host is restored from a checkpoint, and a wrong state is left, in a new generation.
        if cursor.committed < self.committed and (is_same or (self._cluster.scenario.spared and not self._is_wrong)):
            self._fail("commit", f"step {cursor.committed} follows {self.committed} in generation {cursor.generation}")
        if cursor.committed > self.committed + 1:
            self._fail("commit", f"step {cursor.committed} follows {self.committed}")
        if self.record is not None and cursor.generation == self.record.generation and is_same:
            if cursor.committed == self.committed + 1:
                self._require_said("reports", self.record, f"Report {cursor.committed}")
            if cursor.evaluated is not None and before is not None and cursor.evaluated != before.evaluated:
                self._require_said("reports", self.record, f"EvaluationReport {cursor.evaluated.step}")
        self.cursor, self.committed = cursor, cursor.committed
        self._evaluated.append(cursor.evaluated)
        if cursor.phase == "running":
            self._ran.add(cursor.generation)
        if cursor.commit is not None:
            self._commits.add((cursor.generation, cursor.commit.step))
        self._cluster.kernel.log(f"store: {cursor.phase} generation {cursor.generation}, committed {cursor.committed}")

    # The run directory.

    def wrote(self, line: dict[str, Any]) -> None:
        """A leader writes a line of metrics: each micro-batch counts once, to the last bit."""
        step = line["step"]
        expected = self.reference.metrics[step] if self.reference else line
        for key in ("loss", "grad_norm"):
            if line[key] != expected[key]:
                self._fail("bits", f"{key} of step {step} is {line[key]}, without failures {expected[key]}")

    def logged(self, event: dict[str, Any]) -> None:
        """A leader writes an event."""
        cluster = self._cluster
        if event["kind"] == "detected" and cluster.scenario.slow_messages == 0.0:
            worker = event["worker"]
            node = next(node for at, node in cluster.homes.items() if str(at) == worker)
            is_struck = node in self.struck_nodes or Worker.parse(worker) in self.struck_workers
            if not is_struck and not self._is_another(event["cause"]):
                self._fail("fence", f"worker {worker}, which is well: {event['cause']}")
        if event["kind"] == "undone" and self._is_calm:
            self._fail("repeated", f"step {event['step']}, although all departures were announced")
        if event["kind"] == "checkpoint" and not re.search(CHECKPOINT_ERRORS, event.get("error", "within")):
            self._fail("checkpoint", event["error"])

    @property
    def _is_calm(self) -> bool:
        scenario = self._cluster.scenario
        return not (scenario.planned or scenario.crashes) and {f.kind for f in scenario.faults} <= CALM_FAULTS

    @property
    def _is_wrong(self) -> bool:
        """Whether a fault has changed what a worker holds or computes."""
        return any(text.startswith("flip") for text in self._cluster.scenario.planned)

    def _is_another(self, cause: str) -> bool:
        """Whether a cause may lie elsewhere."""
        # Of workers that fail to form together any may be to blame; an agent without a leader, or whose connection to
        # it broke, waits for the store.
        kinds = " ".join(fault.kind for fault in self._cluster.scenario.faults)
        if kinds.count("isolate") > 1 and cause.startswith("cut off from"):
            return True  # of two hosts of a stage that report each other either may be
        return bool(re.search("could not form|ended while no agent led the run", cause)) or (
            bool(re.search("store|lose", kinds)) and cause.startswith("the agent of node")
        )

    # The end.

    def exited(self, node: int, exit: AgentExit | RecycleError) -> None:
        """An agent has ended."""
        # An agent that starts late finds the directory of a run that etcd has forgotten, perhaps without its end.
        late = "|holds another run" if self._cluster.has_ended else ""
        if isinstance(exit, JobError) and not re.search("already has an agent" + late, str(exit)):
            self._fail("refused", f"agent {node}: {exit}")
        if (
            isinstance(exit, RecycleError)
            and self._cluster.scenario.spared
            and not re.search("does not answer|during start-up|has ended while" + late, str(exit))
            and not (self._is_wrong and "different states" in str(exit))
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
        events = [json.loads(line) for line in (cluster.path / "events.jsonl").read_text().splitlines()]
        digests = [event["digests"] for event in events if event["kind"] == "finished"]
        states: dict[int, set[str]] = {}
        for of_worker in (of_worker for of_run in digests for of_worker in of_run.values()):
            for stage, digest in of_worker.items():
                states.setdefault(int(stage), set()).add(digest)
        self.result = Reference(lines, states)
        # A layout that moved has other stages.
        if self.reference and not cluster.scenario.elastic and not states.items() <= self.reference.digests.items():
            raise Violation("bits", f"the final states are {states}")
        if any(len(of_stage) > 1 for of_stage in states.values()):
            raise Violation("bits", f"the hosts of a stage end with different states: {states}")
