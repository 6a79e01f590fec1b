"""A worker's processes in the simulated world; their knowledge is `MemberState`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from recycle.exec.checksums import PARAMETERS, Checksum
from recycle.exec.leader.checkpoints import writer_of
from recycle.exec.leader.commit import Comparison, comparison
from recycle.exec.members import members_of
from recycle.exec.protocol import (
    Acknowledged,
    Commit,
    Copied,
    Copy,
    CopyProgress,
    CutOff,
    EvaluationReport,
    FaultReached,
    FinalState,
    Formed,
    FromWorker,
    GenerationRecord,
    LeaderMessage,
    Ready,
    Report,
    Saved,
    SavedPart,
    Start,
    StepReport,
    StoredFile,
    Trouble,
    WorkerMessage,
)
from recycle.exec.worker.member import MemberState
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts
from tests.exec.leader.rules import Violation

if TYPE_CHECKING:
    from tests.exec.leader.agent import Agent
    from tests.exec.leader.world import World

Wait = float | Callable[[], bool]
"""Seconds to sleep, or what to wait for."""
_COPIES = 2
KILLED = "killed by SIGKILL"


@dataclass(frozen=True)
class State:
    """What a process holds.

    Attributes:
        step: the iteration that it is from; -1 for the initial state.
        origin: the generation that this iteration was computed in, which tells the states of a repeated iteration
            apart; 0 for the initial state.
        units: of the model.
        is_wrong: hardware has changed it.
    """

    step: int
    origin: int
    units: frozenset[int]
    is_wrong: bool = False


class Process:
    """All tensor ranks of a worker's process.

    Args:
        world: that it lives in.
        asked: how it is started.
        agent: of its node.

    Attributes:
        knows: what the leader has told it.
        state: what it holds.
        has_joined: it has connected to its agent.
        takes_part: it has begun with that generation, and not left it.
        is_open: its groups form or stand.
        is_blameless: no fault has struck it.
        is_to_end: a leader has asked for its end, or may have given it up.
    """

    def __init__(self, world: World, asked: Start, agent: Agent) -> None:
        self.world, self.agent, self.name, self.incarnation = world, agent, asked.worker, asked.incarnation
        self.worker = Worker.parse(asked.worker)
        self.members = members_of([asked.worker], world.job.grid.tensor_parallel)
        self.knows = MemberState(asked.worker, asked.incarnation, asked.generation)
        self.has_joined = self.is_to_end = False
        is_first = not asked.generation or asked.restored is not None
        units = world.units_at_start(self.worker) if is_first else frozenset()
        step = -1 if asked.restored is None else asked.restored
        self.state = State(step, 0 if step < 0 else world.checkpoints[step].origin, units)
        self.before: State | None = None
        self.kept: dict[int, State] = {}
        self.reduced = (0, -1)
        self.undone: int | None = None
        self.is_alive, self.is_blameless, self.is_confirmed = True, True, is_first
        self.takes_part = self.is_open = False
        self.is_hung = self.is_silent = self.hangs_next = False
        self.slowness, self.failures_to_form, self.odd_sums = 1.0, 0, 0
        self.broken: dict[int, str] = {}
        self.unreachable: dict[int, str] = {}
        self.announced: set[tuple[int, int]] = set()
        self.writing: set[tuple[int, int]] = set()
        self.copied: list[Copied] = []
        self.formed: tuple[GenerationRecord, frozenset[int]] | None = None
        self.saving: dict[int, list[str]] = {}
        self.saved_step, self.writes_until = -1, 0.0
        self.started, self.progress, self.is_waiting, self.longest = world.now, 0, False, math.nan
        self._awaited: Callable[[], bool] | None = None
        self._life = self._live()
        self._advance()

    # How time passes.

    def _advance(self) -> None:
        while self.is_alive and not self.is_hung:
            wait = next(self._life, None)
            self.progress += 1
            if wait is None:
                return
            if isinstance(wait, float):
                self.is_waiting = False
                if self.hangs_next:
                    self.is_hung = True
                    return
                self.world.after(wait * self.slowness, self._advance)
                return
            if not wait():
                self.is_waiting, self._awaited = True, wait
                return

    def poke(self) -> None:
        """Something has changed that the process may wait for."""
        if self._awaited is not None and self.is_alive and not self.is_hung and self._awaited():
            self._awaited = None
            self._advance()

    def end(self, how: str) -> None:
        """The process ends."""
        if self.is_alive:
            self.is_alive = False
            self.world.ended(self, how)

    # What the leader says.

    def hear(self, message: LeaderMessage) -> None:
        """Take a message of a leader."""
        if self.is_alive:
            self.knows.take(message)
            self.poke()

    @property
    def generation(self) -> int:
        """The generation that it is in."""
        return self.knows.generation

    def _say(self, message: WorkerMessage, generation: int = 0) -> None:
        for member in self.members:
            self._say_as(member, message, generation)

    def _say_as(self, member: str, message: WorkerMessage, generation: int = 0) -> None:
        messages = FromWorker(member, message, generation)
        self.world.rules.said(messages)
        self.agent.hear(messages)

    # What the process does.

    def _live(self) -> Iterator[Wait]:
        world = self.world
        yield world.draw(0.5, 4.0)
        if world.scenario.fails_to_start and world.random.random() < 0.2:
            self.end("ended with exit code 1")
            return
        self.agent.join(self)
        self._say(Ready(self.incarnation))
        while True:
            self.begun: GenerationRecord | None = None
            yield self._may_begin
            if (record := self.begun) is None:
                yield max(0.0, self.writes_until - world.now)
                self.end("ended with exit code 0")
                return
            yield world.pause()
            if record.committed < self.saved_step:
                yield max(0.0, self.writes_until - world.now)
                self.saved_step = -1
                self.announced = {part for part in self.announced if part[0] <= record.committed}
            self._resolve(record)
            commit, is_over = record.commit, False
            if self.is_confirmed:
                self._keep(record, commit)
            if commit is not None and commit.finished and not record.is_evaluation_due:
                is_over = True
            else:
                self.takes_part = True
                commit = yield from self._run_generation(record)
                self.takes_part = self.is_open = False
                self._keep(record, commit)
            if is_over or (commit is not None and commit.finished):
                yield max(world.pause(), self.writes_until - world.now)
                self._say(FinalState(dict.fromkeys(self._final(), f"{self.state.step} {self.state.origin}")))
                yield world.pause()
                self.end("ended with exit code 0")
                return

    def _final(self) -> set[int]:
        """The stages or shards whose final state it tells."""
        return {stage for stage in self.saving if self.world.shards is None or stage in self.state.units}

    def _may_begin(self) -> bool:
        """Begin the next generation if there is one; whether there is, or the process is to leave."""
        self.begun = self.knows.begin()
        return self.begun is not None or self.knows.may_leave

    def _resolve(self, record: GenerationRecord) -> None:
        if self.formed is not None:  # it may have missed that the generation could run
            before, placed = self.formed
            if record.held == before.holds and self.name not in record.joins:
                self.state = replace(self.state, units=placed)
        self.formed = None
        if self.name in record.joins:
            return
        committed, state = record.committed, self.state
        if state.step > committed:
            self.undone = committed + 1
        if state.step > committed and record.has_gone_back:
            self.kept = {step: kept for step, kept in self.kept.items() if step <= committed}
            if committed not in self.kept:
                raise Violation("state", f"{self} is to go back to step {committed}, which it has not kept")
            self.state, self.before = self.kept[committed], None
        elif state.step == committed + 1 and self.before is not None:
            self.state, self.before = self.before, None
        elif state.step == committed - 1 and self.reduced == (self.world.rules.origins.get(committed), committed):
            self.state = replace(state, step=committed, origin=self.reduced[0])
        self.world.rules.settled(self, record)

    def _run_generation(self, record: GenerationRecord) -> Iterator[Wait]:
        world, g = self.world, record.generation
        yield world.pause()
        self._say(Acknowledged(self.undone == record.committed + 1), g)
        yield lambda: self.knows.permit("form") is not None or self.knows.is_over
        if self.knows.permit("form") is None:
            return None
        self.undone, self.is_open = None, True
        placed = yield from self._form(record)
        if placed is None:
            return None
        self.formed = record, placed
        yield lambda: self.knows.permit("run") is not None or self.knows.is_over
        if self.knows.permit("run") is None:
            return None
        hosts = world.hosts_of(record)
        self.state, self.formed = replace(self.state, units=placed), None
        self.is_confirmed = True
        of_stages = hosts.hosts_of_stages()
        self.saving = {stage: list(map(str, of_stages[stage])) for stage in hosts.stages[self.worker]}
        return (yield from self._iterate(record, hosts))

    def _form(self, record: GenerationRecord) -> Iterator[Wait]:
        """The units that it hosts then; None where the groups do not form."""
        world, g, limits = self.world, record.generation, self.world.job.membership
        began = world.now
        world.watch_peers(self, record)
        yield world.pause()
        if self.failures_to_form:
            self.failures_to_form -= 1
            self._say(Formed("no port is free"), g)
            world.breaks(record, f"worker {self.name} has left", but=self)
            return None
        world.after(limits.form_timeout, self.poke)
        if not (yield from self._meet(record, "form", lambda: world.now >= began + limits.form_timeout)):
            if g in self.unreachable:
                self._say_as(self.members[0], CutOff(self.unreachable[g]), g)
            elif g in self.broken:
                self._say(Formed(self.broken[g]), g)
            elif not self.knows.is_over:
                self._say(Formed("others did not come", True), g)
            return None
        copied: list[Copied] = []
        units = self.state.units if self.name not in record.joins else frozenset()
        for copy in record.copies:
            if self.name not in (copy.worker, copy.source):
                continue
            yield world.pause()
            source = world.process(copy.source)
            if source is None or source.generation != g:
                yield lambda: self._is_interrupted(g)
                if not self.knows.is_over:
                    self._say(Formed(f"worker {copy.source} is gone"), g)
                return None
            if self.name == copy.worker:
                moved = frozenset(range(copy.first, copy.last))
                if not moved <= source.state.units:
                    raise Violation("state", f"{source} is to give units {sorted(moved - source.state.units)}")
                units |= moved
                self.state = replace(source.state, units=self.state.units)
                copied.append(Copied(copy.source, copy.first, copy.last, 1, 0.1))
        if self.name in record.joins:
            self.kept, self.before = {}, None
            self.state = replace(self.state, step=record.committed, origin=world.rules.origins[record.committed])
        wanted = world.units_of(world.hosts_of(record), self.worker)
        if not wanted <= units:
            raise Violation("state", f"no worker gives {self} units {sorted(wanted - units)}")
        self._say(Formed("", False, copied), g)
        return wanted

    def _meet(
        self, record: GenerationRecord, where: object, late: Callable[[], bool] = lambda: False
    ) -> Iterator[Wait]:
        """Wait for all processes of the generation to come here; whether they have."""
        g = record.generation
        holders = self.world.there.setdefault((g, where), set())
        holders.add(self.name)
        count = len(record.live)
        if len(holders) == count:
            self.world.poke_all(g)
        yield lambda: len(holders) == count or self._is_interrupted(g) or late()
        return len(holders) == count

    def _is_interrupted(self, g: int) -> bool:
        return self.knows.is_over or g in self.broken or g in self.unreachable

    def _leave(self, g: int) -> None:
        """Say why the generation is left, if this process knows."""
        if g in self.unreachable:
            self._say_as(self.members[0], CutOff(self.unreachable[g]), g)
        elif g in self.broken:
            self._say_as(self.members[0], Trouble(f"worker {self.name}: {self.broken[g]}"), g)

    def _iterate(self, record: GenerationRecord, hosts: Hosts) -> Iterator[Wait]:
        world, job, g, n = self.world, self.world.job, record.generation, record.committed
        commit, behind = record.commit, [copy for copy in record.behind if copy.worker == self.name]
        self.before, self.copied = None, []
        if record.is_evaluation_due:
            assert commit is not None
            if not (yield from self._evaluate(record, commit)) or commit.finished:
                return commit if commit.finished and not self.knows.is_over else None
        while True:
            n += 1
            is_first = n == record.committed + 1
            yield world.draw(0.2, 0.8)
            self.longest = 0.8 * self.slowness
            if (fault := self._due(n, "compute")) is not None:
                yield from self._be_struck(fault)
            if not (yield from self._meet(record, n)):
                self._leave(g)
                return None
            verified = None if record.verified is None else record.verified.step
            compared = comparison(n, record.committed + 1, job.compared_every(record.rounds), record.rounds, verified)
            if compared is not None:
                if not is_first and (yield from self._decision(n - 1)) is None:
                    return None
                self._compare(compared)
            self.reduced = (g, n)
            report = self._report(record, n, hosts, compared)
            self._say(StepReport(n, report), g)
            world.rules.reported(g, n, self.name)
            mode = record.mode
            if not is_first:
                commit = yield from self._decision(n - 1)
                if commit is None:
                    return None
                mode = commit.next_mode
            self._keep(record, commit)
            if mode == "barrier":
                commit = yield from self._decision(n)
                if commit is None:
                    return None
            self._copy_behind(g, behind)
            yield world.pause() / 4
            self.before, self.state = self.state, replace(self.state, step=n, origin=g)
            if (fault := self._due(n, "gather")) is not None:
                yield from self._be_struck(fault)
            if world.shards is not None and not (yield from self._meet(record, ("gather", n))):
                self._leave(g)
                return None
            self._keep(record, commit)
            is_last = commit is not None and commit.last == n
            if job.evaluation.every and (is_last or job.is_evaluated(n, False)):
                commit = yield from self._decision(n)
                if commit is None:
                    return None
                if commit.evaluate and not (yield from self._evaluate(record, commit)):
                    return None
            if is_last:
                return (yield from self._decision(n))

    def _due(self, step: int, phase: str) -> int | None:
        """The fault that has its point here, unless it has struck before."""
        for number, fault in enumerate(self.world.faults):
            if (fault.strikes, fault.worker, fault.step, fault.text) == (True, self.worker, step, phase):
                return None if number in self.knows.strikes else number
        return None

    def _be_struck(self, fault: int) -> Iterator[Wait]:
        self._say_as(self.name, FaultReached(fault))
        yield lambda: fault in self.knows.strikes
        if self.knows.strikes[fault] == self.name:
            self.world.rules.struck(self, fault)
            self.end(KILLED)
            yield lambda: False

    def _decision(self, step: int) -> Iterator[Wait]:
        """The commit of a step; None when the generation ends before."""
        yield lambda: self.knows.commit(step) is not None or self.knows.is_over
        return self.knows.commit(step)

    def _evaluate(self, record: GenerationRecord, commit: Commit) -> Iterator[Wait]:
        """Evaluate the state after a commit; whether that came to its end."""
        g, step = record.generation, commit.step
        yield self.world.draw(0.1, 0.5)
        if not (yield from self._meet(record, ("evaluation", step))):
            self._leave(g)
            return False
        self._say(StepReport(step, EvaluationReport([1.0], [2.0])), g)
        self.world.rules.reported(g, ("evaluation", step), self.name)
        yield lambda: self.knows.evaluated(step) is not None or self.knows.is_over
        return self.knows.evaluated(step) is not None

    def _compare(self, compared: Comparison) -> None:
        """Keep the state that is compared, as `StateSnapshots` does."""
        if not compared.is_kept:
            return
        older = sorted(self.kept)
        if compared.step not in self.kept and len(older) == _COPIES:
            del self.kept[next(kept for kept in older if kept != compared.besides)]
        self.kept[compared.step] = self.state

    def _copy_behind(self, g: int, behind: list[Copy]) -> None:
        """Copy what comes while the generation runs, unless that takes longer."""
        while behind and self.world.random.random() < 0.5:
            copy = behind.pop(0)
            source = self.world.process(copy.source)
            if source is None or source.generation != g:
                return
            moved = frozenset(range(copy.first, copy.last))
            if not moved <= source.state.units:
                raise Violation("state", f"{source} is to give shards {sorted(moved - source.state.units)}")
            self.state = replace(self.state, units=self.state.units | moved)
            self.copied.append(Copied(copy.source, copy.first, copy.last, 1, 0.1))
            self._say(CopyProgress(list(self.copied)), g)

    def _report(self, record: GenerationRecord, n: int, hosts: Hosts, compared: Comparison | None) -> Report:
        world, stages = self.world, set(hosts.stages[self.worker])
        count = len(hosts.hosts_of_stages())
        norm = math.nan if world.is_nan(record.generation, n) else world.norm(n) ** 2 / count
        states, has_loss = stages, count - 1 in stages
        if world.shards is not None:
            ranges = (range(copy.first, copy.last) for copy in record.behind if copy.worker == self.name)
            behind = {number for numbers in ranges for number in numbers}
            stages, has_loss = stages | behind, self.worker.rank == world.job.shape.ranks - 1
            states = {*(stages & self.state.units), PARAMETERS + self.worker.rank}
        odd = 0
        if self.odd_sums:
            self.odd_sums -= 1
            odd = 1 + self.worker.pipeline
        state = Checksum(7 + self.state.is_wrong * (1 + self.worker.pipeline), self.state.step + 2)
        return Report(
            {stage: [norm] if stage in stages else [] for stage in sorted(stages | (states if compared else set()))},
            1.0 if has_loss else None,
            checksums=dict.fromkeys(stages, 100 * n + odd),
            states={} if compared is None else dict.fromkeys(sorted(states), (state.words, state.places)),
        )

    def _keep(self, record: GenerationRecord, commit: Commit | None) -> None:
        """Write what this process has to write of a checkpoint, as `Saver.keep` does."""
        world = self.world
        if commit is None or not commit.checkpoint or commit.step in (self.saved_step, -1):
            return
        if self.state.step != commit.step:
            return
        ranks = range(len(self.members))
        to_write = [
            stage
            for stage, hosts in self.saving.items()
            if writer_of(stage, hosts, record) == self.name and (commit.step, stage) not in self.announced
        ]
        if not to_write:
            return
        self.saved_step = commit.step
        busy = self.writes_until > world.now and not commit.finished
        error = "the previous checkpoint is still being written" if busy else ""
        if world.scenario.disk_fails and world.random.random() < 0.2:
            error = "no space is left"
        seconds = max(0.0, self.writes_until - world.now) + (0.0 if busy else world.draw(0.1, 3.0))
        origin = self.state.origin
        self.writing |= {(commit.step, stage) for stage in to_write if not error}
        self.announced |= {(commit.step, stage) for stage in to_write}

        def post() -> None:
            if self.is_alive:
                for stage in to_write:
                    for rank in ranks:
                        name = f"{commit.step}/{stage}.{rank}"
                        files = {} if error else {name: StoredFile(origin, "")}
                        world.files.update(dict.fromkeys(files, origin))
                        self._say_as(self.members[rank], SavedPart(commit.step, stage, rank, Saved(files, error)))
                if not error:
                    self.writing -= {(commit.step, stage) for stage in to_write}

        if not busy:
            self.writes_until = world.now + seconds
        world.after(0.0 if busy else seconds, post)

    def __str__(self) -> str:
        return f"process {self.incarnation} of worker {self.name}"
