"""What must hold in every history of a run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from recycle.errors import RecycleError
from recycle.exec.leader.actions import Finish, Persist
from recycle.exec.members import joined_digests, members_of
from recycle.exec.protocol import (
    Acknowledged,
    Commit,
    Committed,
    Cursor,
    Evaluated,
    EvaluationResult,
    Formed,
    FromWorker,
    GenerationRecord,
    LeaderMessage,
    Permit,
    Propose,
    Start,
    Stop,
    Strike,
)
from recycle.job.shape import Worker

if TYPE_CHECKING:
    from tests.exec.leader.process import Process
    from tests.exec.leader.world import World

CHANGE_WHILE_RUNNING = ("committed", "commit", "mode", "evaluated", "verified", "candidate", "holds")
"""Fields of a record that the cursor has as well, or that a copy changes."""


class Violation(Exception):
    """A rule is violated.

    Args:
        rule: its name.
        what: what happened.
    """

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class Rules:
    """Checks one world.

    Attributes:
        record, cursor: the register.
        committed: the last committed step.
        origins: step -> the generation that it was computed in, of the committed steps.
        origin_of: generation -> that of the step that it begins after.
        commits: how many there were.
        first: the step that the run begins with.
        lines: step -> number of the leader that wrote its line of metrics.
        evaluations: the evaluated steps.
        stopped: generations with a `Stop` message.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.record: GenerationRecord | None = None
        self.cursor: Cursor | None = None
        self.committed, self.commits = -1, 0
        self.origins, self.origin_of = {-1: 0}, dict[int, int]()
        self.first = 0
        self.lines: dict[int, int] = {}
        self.evaluations: set[int] = set()
        self.stopped: set[int] = set()
        self._started: dict[tuple[int, Worker], int] = {}
        self._struck: set[int] = set()
        self._rewinds_to: int | None = None
        self._evaluated: Evaluated | None = None
        self._proposed: dict[int, GenerationRecord] = {}
        self._told: dict[tuple[int, int], Commit] = {}
        self._permitted: set[tuple[int, str]] = set()
        self._acknowledged: dict[int, set[str]] = defaultdict(set)
        self._formed: dict[int, dict[str, str]] = defaultdict(dict)
        self._reported: dict[tuple[int, object], set[str]] = defaultdict(set)

    def resumed(self, step: int) -> None:
        """The run resumes from a checkpoint."""
        self.committed, self.first = step, step + 1
        self.origins[step] = 0

    # What processes say and do.

    def said(self, message: FromWorker) -> None:
        """A process says something."""
        match message.message:
            case Acknowledged():
                self._acknowledged[message.generation].add(message.member)
            case Formed(error=error):
                self._formed[message.generation][message.member] = error

    def reported(self, generation: int, what: object, worker: str) -> None:
        """A worker has sent its part of a commit or of an evaluation."""
        self._reported[generation, what].add(worker)

    def struck(self, process: Process, fault: int) -> None:
        """A fault strikes a process."""
        if fault in self._struck:
            self._fail("fault", f"{fault} strikes {process} although it has struck before")
        self._struck.add(fault)

    def settled(self, process: Process, record: GenerationRecord) -> None:
        """A process has settled for a generation."""
        state, origin = process.state, self.origin_of[record.generation]
        if (state.step, state.origin) != (record.committed, origin):
            self._fail(
                "state",
                f"{process} has {state}, generation {record.generation} continues from {record.committed} of {origin}",
            )

    def _fail(self, rule: str, what: str) -> None:
        raise Violation(rule, what)

    # What the leader does.

    def persisted(self, action: Persist, is_partial: bool = False) -> None:
        """The register is written; with `is_partial` only its record, as the leader ended before the cursor."""
        record = action.record or self.record
        if record is None:
            return self._fail("persist", "a cursor without a record")
        before, was_finished = self.record, self.is_finished
        if before is not None and record.generation < before.generation:
            self._fail("generation", f"{record.generation} follows {before.generation}")
        self.record = record
        if not is_partial:
            self.cursor = action.cursor
            if action.cursor.generation != record.generation:
                self._fail("persist", f"a cursor of generation {action.cursor.generation} for {record.generation}")
        evaluated = record.evaluated if self.cursor is None else self.cursor.evaluated
        if evaluated is not None and evaluated != self._evaluated:
            missing = set(record.live) - self._reported[record.generation, ("evaluation", evaluated.step)]
            if missing and not is_partial:
                self._fail("reports", f"{evaluated} is decided without {sorted(missing)}")
        self._evaluated = evaluated
        committed = record.committed
        if self.cursor is not None and self.cursor.generation == record.generation:
            committed = self.cursor.committed
        is_new = before is None or record.generation != before.generation
        if is_new and was_finished and not self.is_finished:  # it may have workers end that have left too early
            self._fail("finish", f"generation {record.generation} follows on the last iteration")
        if is_new and record.mode != "barrier":
            self._fail("mode", f"generation {record.generation} begins with a {record.mode} step")
        if is_new:
            self.origin_of[record.generation] = self.origins.get(committed, -1)
        if committed == self.committed + 1 and not is_new:
            self._committed(record, committed)
        elif committed < self.committed and is_new:
            self._rewinds_to = committed
            self.origins = {step: origin for step, origin in self.origins.items() if step <= committed}
        elif committed != self.committed:
            self._fail("gap", f"step {committed} follows {self.committed} in generation {record.generation}")
        self.committed = committed

    @property
    def is_finished(self) -> bool:
        """Whether the register says that nothing is left to train."""
        record, cursor = self.record, self.cursor
        if record is None:
            return False
        state = record if cursor is None or cursor.generation != record.generation else cursor
        is_evaluated = state.evaluated is not None and state.evaluated.step == state.committed
        commit = state.commit
        return commit is not None and commit.finished and (is_evaluated or not commit.evaluate)

    def _committed(self, record: GenerationRecord, step: int) -> None:
        g = record.generation
        if self._rewinds_to is not None:
            self._fail("rewind", f"step {step} is committed before the rewind to {self._rewinds_to}")
        if missing := set(record.live) - self._reported[g, step]:
            self._fail("reports", f"step {step} of generation {g} is committed without {sorted(missing)}")
        if g in self.stopped:
            self._fail("stop", f"step {step} is committed in generation {g}, which was stopped")
        self.origins[step] = g
        self.commits += 1

    def told(self, message: LeaderMessage) -> None:
        """The leader says something to all."""
        record, cursor = self.record, self.cursor
        if isinstance(message, Propose | Permit | Committed | EvaluationResult | Stop) and record is None:
            return self._fail("persist", f"{message} without a register")
        assert record is not None or not isinstance(message, Propose | Permit)
        match message:
            case Propose(record=proposed):
                assert record is not None
                if proposed.generation != record.generation:
                    self._fail(
                        "persist", f"generation {proposed.generation} is proposed, {record.generation} persisted"
                    )
                known = self._proposed.setdefault(proposed.generation, proposed)
                if _identity(known) != _identity(proposed):
                    self._fail("generation", f"{proposed.generation} is proposed with another record")
                for process in self._world.running:
                    number = process.generation
                    if process.takes_part and number < proposed.generation and number not in self.stopped:
                        self._fail("stop", f"{process} takes part in {number}, which was not stopped")
            case Permit(generation=g, what=what):
                assert record is not None
                if g != record.generation:
                    self._fail("permit", f"generation {g} may {what}, the present one is {record.generation}")
                if what == "run" and (cursor is None or (cursor.generation, cursor.phase) != (g, "running")):
                    self._fail("persist", f"{message}, which was not persisted")
                if (g, what) not in self._permitted:
                    self._permitted.add((g, what))
                    self._permit_form(record) if what == "form" else self._permit_run(record)
            case Committed(generation=g, commit=commit):
                # Another leader tells again what the record of its generation began with.
                known = [(state.generation, state.commit) for state in (cursor, record) if state]
                if (g, commit) not in [*known, (g, None if cursor is None else cursor.earlier)]:
                    self._fail("persist", f"{message} is not what is persisted")
                if self._told.setdefault((g, commit.step), commit) != commit:
                    self._fail("commit", f"step {commit.step} of generation {g} is sent with other content")
            case EvaluationResult(generation=g, evaluated=evaluated):
                if cursor is None or cursor.evaluated != evaluated:
                    self._fail("persist", f"{message} is not what is persisted")
                self.evaluations.add(evaluated.step)
            case Strike(fault=fault):
                if cursor is None or fault not in cursor.struck:
                    self._fail("persist", f"{message}, which was not persisted")
            case Stop(generation=g):
                assert record is not None
                if g != record.generation:
                    self._fail("stop", f"generation {g} is stopped, the present one is {record.generation}")
                self.stopped.add(g)

    def _permit_form(self, record: GenerationRecord) -> None:
        g = record.generation
        members = set(members_of(record.live, self._world.job.grid.tensor_parallel))
        if missing := members - self._acknowledged[g]:
            self._fail("form", f"generation {g} forms without {sorted(missing)}")

    def _permit_run(self, record: GenerationRecord) -> None:
        g, world = record.generation, self._world
        for member in members_of(record.live, world.job.grid.tensor_parallel):
            if self._formed[g].get(member, "has not formed"):
                self._fail("run", f"generation {g} runs, and {member} {self._formed[g].get(member, 'has not formed')}")
        hosts = world.hosts_of(record)
        held = set[int]()
        for name in record.live:
            held |= world.units_of(hosts, Worker.parse(name))
            process = world.process(name)
            if process is not None and process.generation == g:
                self.settled(process, record)
        if len(held) < hosts.count:
            self._fail("state", f"generation {g} runs without units {sorted(set(range(hosts.count)) - held)}")
        for process in world.running:
            if process.is_open and process.generation < g and process.generation not in self.stopped:
                self._fail("run", f"generation {g} runs while {process} is in {process.generation}")

    def started(self, node: int, asked: Start) -> None:
        """The leader starts a process on a node."""
        world, worker = self._world, Worker.parse(asked.worker)
        process, agent = world.process(worker), world.nodes[node]
        if process is not None and not process.is_to_end:
            self._fail("start", f"{asked} while {process} runs")
        started = agent.processes.get(worker) if agent.is_alive else None
        latest = max(-1 if started is None else started.incarnation, self._started.get((world.leaders, worker), -1))
        if asked.incarnation <= latest:
            self._fail("start", f"{asked} again")
        self._started[world.leaders, worker] = asked.incarnation
        if asked.restored is not None and asked.restored not in world.checkpoints:
            self._fail("start", f"{asked}; there are checkpoints {sorted(world.checkpoints)}")

    def logged(self, kind: str, fields: Mapping[str, Any]) -> None:
        """The leader writes an event."""
        may_be_wrong = self._world.scenario.slow_messages or self._world.has_stalled
        # Of workers that fail to form together any may be to blame; what ended without a leader is an earlier process.
        is_of_process = not re.search("could not form|ended while no agent led the run", fields.get("cause", ""))
        if kind == "detected" and is_of_process and not may_be_wrong:
            process = self._world.process(fields["worker"])
            if process is not None and process.is_blameless:
                self._fail("fence", f"{process}, which is well: {fields['cause']}")

        if kind == "checkpoint" and "ended before it had written" in fields.get("error", ""):
            self._given_up(fields["step"])

    def _given_up(self, step: int) -> None:
        world = self._world
        assert self.record is not None
        assert world.leader is not None
        live = world.leader.live
        every = world.hosts_of(self.record).hosts_of_stages() if self.record.plan else ()
        missing = {(step, stage) for stage in every if not world.is_written(step, stage)}
        writing = {part for process in world.running if process.worker in live for part in process.writing}
        is_known = world.shards is None and world.job.grid.tensor_parallel == 1  # else hosts have several parts
        if is_known and missing and missing <= writing:
            self._fail("checkpoint", f"of step {step} is given up while {sorted(missing)} are being written")

    def wrote(self, line: Mapping[str, Any]) -> None:
        """The leader writes a line of metrics."""
        step, leader = line["step"], self._world.leaders
        if step != self.committed:
            self._fail("line", f"of step {step}, the committed one is {self.committed}")
        if self.lines.get(step) == leader:
            self._fail("line", f"of step {step} again")
        self.lines[step] = leader

    def rewound(self, step: int) -> None:
        """The leader has what is later than a step removed."""
        if step != self.committed:
            self._fail("rewind", f"to step {step}, the committed one is {self.committed}")
        self._rewinds_to = None
        self.lines = {at: leader for at, leader in self.lines.items() if at <= step}
        self.evaluations = {at for at in self.evaluations if at <= step}

    # The end.

    def finished(self, action: Finish) -> None:
        """The run is over."""
        world = self._world
        if action.step != self.committed:
            self._fail("finish", f"with step {action.step}, the committed one is {self.committed}")
        if not action.ended_early and self.committed != world.scenario.steps - 1:
            self._fail("finish", f"with step {self.committed}")
        if action.ended_early and not world.may_end_early:
            self._fail("finish", f"early with step {self.committed}")
        if self._rewinds_to is not None:
            self._fail("rewind", f"the run ends without that to {self._rewinds_to}")
        missing = set(range(self.first, self.committed + 1)) - self.lines.keys()
        if missing - ({self.committed} if action.ended_early else set()):
            self._fail("line", f"none of steps {sorted(missing)}")
        every = world.job.evaluation.every
        due = {step for step in range(self.first, self.committed) if every and (step + 1) % every == 0}
        if due - self.evaluations:
            self._fail("evaluation", f"none of steps {sorted(due - self.evaluations)}")
        states = defaultdict[int, set[str]](set)
        for of_worker in action.digests.values():
            for stage, digest in of_worker.items():
                states[stage].add(digest)
        digest = {0: f"{self.committed} {self.origins[self.committed]}"}
        expected = set(joined_digests([digest] * world.job.grid.tensor_parallel).values())
        if any(digests != expected for digests in states.values()):
            self._fail("finish", f"with states {dict(states)}, the committed one is {expected}")

    def failed(self, error: RecycleError) -> None:
        """The run cannot go on."""
        text, scenario = str(error), self._world.scenario
        reasons = {
            r"no live host|nodes .* have left again": True,
            r"gave up after \d+ attempts": True,
            r"no plan for": scenario.plans_fail,
            r"were not ready within": True,
            r"during start-up": scenario.fails_to_start or scenario.is_struck,
            r"also when repeated": scenario.is_wrong,
            r"end with different states": scenario.is_wrong,
        }
        if not any(may and re.search(reason, text) for reason, may in reasons.items()):
            self._fail("fail", text)
        if "no complete checkpoint" in text and self._world.checkpoints_upto_verified():
            self._fail("fail", f"{text}; complete are {sorted(self._world.checkpoints)}")


def _identity(record: GenerationRecord) -> dict[str, Any]:
    fields = msgspec.structs.asdict(record)
    return {name: value for name, value in fields.items() if name not in CHANGE_WHILE_RUNNING}
