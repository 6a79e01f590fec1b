"""Discrete-event simulation of one system over one failure trace, for days or years.

Training is a sequence of iterations of `period` seconds; only committed samples count. A failure takes effect
immediately. A failure in a pause restarts the pause, with the longer duration per cause, because pending copies and
starts are still needed. Before a failure with a notice the iteration ends, and a checkpoint is written if one will be
read. Returning nodes are usable after `[pauses] start` and join at the next iteration boundary. A slow node changes the
period at once, by the system's `pace`. Silent corruption undoes what is `unnoticed`, or returns to a checkpoint from
before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

from recycle.systems.failures import FailureTrace, NodeChange, mean_per_part
from recycle.systems.scenario import Scenario
from recycle.systems.system import (
    ActiveConfiguration,
    Change,
    Checkpoints,
    DoesNotFit,
    Loss,
    Nodes,
    State,
    Stopped,
    System,
)

CAUSES = (
    "detect",
    "plan",
    "rebuild",
    "copy",
    "restart",
    "checkpoint",
    "redone",
    "dropped",
    "stopped",
    "idle",
    "degraded",
)
"""Causes of lost time.

`redone`: work lost to a failure. `dropped`: work on batches with dropped samples. `idle`: live workers without work.
`degraded`: the rest, from missing workers and from the end of the trace.
"""
_TOLERANCE = 1e-6
"""Share of an iteration; an end closer than this counts as reached."""
ShareProgress = Callable[[float], None]


@dataclass(frozen=True)
class Transition:
    """A change of the live nodes or of the configuration; `pause` may be interrupted by another failure."""

    time: float
    event: str
    failed: Nodes
    joined: Nodes
    pause: float
    state: State


@dataclass(frozen=True)
class Outcome:
    """Result of a system on a trace.

    Attributes:
        seconds: length of the trace.
        gpus: GPUs of the job, dead or alive, because all are paid for.
        samples: committed samples without later rollback.
        fault_free: samples per second with every node alive and no checkpoints.
        lost: cause -> seconds; with `samples / fault_free` they sum to `seconds`.
        dropped: samples left out of the batches of committed iterations.
        bytes: bytes copied over the network.
        misfit: why the job does not fit into memory; all figures are 0 in that case.
        copies: copies of each part of the optimizer's state; 0 if every host of a stage has all of it.
    """

    system: str
    trace: str
    seconds: float
    gpus: int
    samples: float = 0.0
    fault_free: float = 0.0
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    dropped: float = 0.0
    bytes: float = 0.0
    transitions: tuple[Transition, ...] = ()
    misfit: DoesNotFit | None = None
    copies: int = 0

    @property
    def goodput(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def ettr(self) -> float:
        """Effective training time ratio: fault-free training time over total time."""
        return self.goodput / self.fault_free if self.fault_free else 0.0

    @property
    def gpu_seconds_per_sample(self) -> float:
        """Cost of a sample; infinite without committed samples."""
        return self.gpus * self.seconds / self.samples if self.samples else inf

    def rates(self, parts: int) -> list[float]:
        """Return mean samples per second in equal parts of the time, including samples rolled back later."""
        steps: list[tuple[float, float]] = []
        ends = [*(transition.time for transition in self.transitions[1:]), self.seconds]
        for transition, end in zip(self.transitions, ends, strict=True):
            steps.append((transition.time, 0.0))
            if transition.time + transition.pause < end:
                steps.append((transition.time + transition.pause, transition.state.rate))
        return mean_per_part(steps, self.seconds, parts)

    @property
    def events(self) -> dict[str, int]:
        return dict(Counter(transition.event for transition in self.transitions))

    @property
    def layout(self) -> str:
        return next((transition.state.layout for transition in self.transitions if transition.state.layout), "")

    def state_after(self, failures: int) -> State | None:
        """Return the state after a number of failure changes and their pause; None if there were fewer."""
        states = [
            transition.state for transition in self.transitions if transition.failed or transition.event == "start"
        ]
        return states[failures] if failures < len(states) else None


def run(
    system: System,
    scenario: Scenario,
    trace: FailureTrace,
    progress: ShareProgress | None = None,
) -> Outcome:
    """Run a system over a trace fitted to the scenario's nodes, and report the completed share.

    Raises:
        ValueError: the trace has another number of nodes.
    """
    if trace.nodes != scenario.nodes:
        raise ValueError(
            f"the trace is for {trace.nodes} nodes, the scenario has {scenario.nodes}: use FailureTrace.fitted"
        )
    full_cluster = system.begin(scenario.all_nodes)
    if isinstance(full_cluster, DoesNotFit):
        return Outcome(system.name, trace.name, trace.end, scenario.gpus, misfit=full_cluster)
    cluster = _Cluster(system, scenario, trace)
    cluster.play(trace.end, progress)
    return cluster.outcome(full_cluster.rate)


@dataclass(frozen=True)
class _Work:
    """Progress of training, and the content of a checkpoint.

    `kept` are seconds whose work still counts; `idle` weighs them by the share of idle slots.
    """

    committed: float = 0.0
    dropped: float = 0.0
    kept: float = 0.0
    idle: float = 0.0


@dataclass
class _Cluster:
    system: System
    scenario: Scenario
    trace: FailureTrace
    now: float = 0.0
    state: State = field(init=False)
    at_full_speed: State = field(init=False)  # the same without slow nodes
    slow: dict[int, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    work: _Work = _Work()
    saved: _Work = _Work()
    written: deque[tuple[float, _Work]] = field(default_factory=deque)  # checkpoints, from `[pauses] notice` ago on
    pending: tuple[float, _Work] | None = None  # a checkpoint being written, and the time from which it counts
    phase: float = 0.0  # completed share of the iteration in progress
    partial: float = 0.0  # seconds spent on the iteration in progress
    since: int = 0  # iterations since the last checkpoint
    stall: float = 0.0  # remaining seconds of the checkpoint being written
    pause: dict[str, float] = field(default_factory=dict)
    pause_left: dict[str, float] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    bytes: float = 0.0
    transitions: list[Transition] = field(default_factory=list)

    def play(self, until: float, progress: ShareProgress | None) -> None:
        up, early = self.trace.up, [change for change in self.trace.changes if change.time <= 0]
        for change in early:
            up = up - change.failed | change.joined
        first_state = self.system.begin(up)
        self._adopt(first_state.stopped(up) if isinstance(first_state, DoesNotFit) else first_state)
        self._record_transition("start", frozenset(), up, 0.0)
        usable: dict[int, float] = {}  # times from which returned nodes are usable
        events: list[tuple[float, NodeChange | tuple[int, float]]] = [
            *((change.time, change) for change in self.trace.changes[len(early) :]),
            *((period.begin, (period.node, period.factor)) for period in self.trace.slow),
            *((period.end, (period.node, 1.0)) for period in self.trace.slow),
        ]
        for number, (time, event) in enumerate(sorted(events, key=lambda each: each[0])):
            if time >= until:
                break
            self._collect_usable(usable, time)
            self._advance_to(time)
            if isinstance(event, NodeChange):
                for node in event.failed:
                    usable.pop(node, None)
                    self.slow.pop(node, None)
                self.waiting -= event.failed
                dead = event.failed & self.state.live
                if dead:
                    self._apply_change(dead, frozenset(), event)
                usable |= dict.fromkeys(event.joined, time + self.scenario.pauses.start)
            else:
                node, factor = event
                self.slow.pop(node, None)
                if factor > 1 and node in self.state.live:
                    self.slow[node] = factor
                self._adopt(self.at_full_speed)
            if progress and number % 64 == 0:
                progress(time / until)
        self._collect_usable(usable, until)
        self._advance_to(until)

    def _adopt(self, state: State) -> None:
        self.state = self.at_full_speed = state
        if self.slow and isinstance(state, ActiveConfiguration):
            pace = getattr(self.system, "pace", lambda state, slow: max(slow.values()))
            self.state = replace(state, period=state.period * pace(state, self.slow))

    def _collect_usable(self, usable: dict[int, float], until: float) -> None:
        for node, time in list(usable.items()):
            if time > until:
                break
            del usable[node]
            self._advance_to(time)
            self.waiting.add(node)

    def _advance_to(self, time: float) -> None:
        while self.now < time:
            if self.pause_left:
                self._pass_pause(time)
            elif isinstance(self.state, Stopped):
                if self.waiting:
                    self._admit_waiting()
                else:
                    self.lost["stopped"] += time - self.now
                    self.now = time
            elif self.waiting or self.state.reconsider:
                until_boundary = self.stall or ((1 - self.phase) * self.state.period if self.phase else 0.0)
                if until_boundary and self.now + until_boundary == self.now:  # too short to advance the clock
                    self._count_iterations(self.state, 1, 0.0)
                    self.phase = self.partial = self.stall = 0.0
                self._train(self.state, min(time, self.now + until_boundary))
                if self.phase * self.state.period <= _TOLERANCE and not self.stall:
                    self._admit_waiting()
            else:
                self._train(self.state, time)

    def _admit_waiting(self) -> None:
        joined = frozenset(self.waiting)
        self.waiting.clear()
        self._apply_change(frozenset(), joined)

    def _pass_pause(self, time: float) -> None:
        for cause, remaining in list(self.pause_left.items()):
            passed = min(remaining, time - self.now)
            self.lost[cause] += passed
            self.now += passed
            if passed < remaining:
                self.pause_left[cause] = remaining - passed
                self.now = time
                return
            del self.pause_left[cause]

    def _train(self, state: ActiveConfiguration, time: float) -> None:
        checkpoints, period = state.checkpoints, state.period
        every = inf if checkpoints is None else max(1, round(checkpoints.every / period))
        cycle = inf if checkpoints is None else every * period + checkpoints.stall
        singly = 1 + ceil(self.scenario.pauses.notice / cycle)  # checkpoints that corruption may undo
        while self.now < time:
            room = time - self.now
            until_checkpoint = (max(1, every - self.since) - self.phase) * period
            if self.stall:
                passed = min(self.stall, room)
                self.lost["checkpoint"] += passed
                self.now += passed
                self.stall -= passed
                if not self.stall:
                    self._start_checkpoint(checkpoints)
            elif checkpoints and not self.phase and not self.since and room >= (1 + singly) * cycle:
                cycles = int(room // cycle) - singly  # complete cycles of iterations and a checkpoint
                end = self.now + cycles * cycle
                self._count_iterations(state, cycles * int(every), cycles * every * period)
                self.lost["checkpoint"] += cycles * checkpoints.stall
                self.now = end
                self._start_checkpoint(checkpoints)
            elif checkpoints and until_checkpoint <= room + _TOLERANCE * period:
                self._count_iterations(state, max(1, int(every) - self.since), min(until_checkpoint, room))
                self.phase = self.partial = 0.0
                self.stall = checkpoints.stall
                if not self.stall:
                    self._start_checkpoint(checkpoints)
            else:
                reached = self.phase + room / period
                done = floor(reached + _TOLERANCE)
                self._count_iterations(state, done, room)
                self.phase = max(0.0, reached - done)
                self.partial = self.phase * period if done else self.partial + room
                self.now = time

    def _count_iterations(self, state: ActiveConfiguration, iterations: int, seconds: float) -> None:
        work, idle = self.work, state.idle / max(1, len(self.scenario.node_of))
        self.work = _Work(
            work.committed + iterations * state.samples,
            work.dropped + iterations * state.dropped,
            work.kept + seconds,
            work.idle + seconds * idle,
        )
        self.since += iterations
        self.now += seconds

    def _start_checkpoint(self, checkpoints: Checkpoints | None) -> None:
        assert checkpoints is not None
        self._finish_checkpoint()
        self.pending = self.now + checkpoints.lag, self.work
        self.since = 0
        self._finish_checkpoint()

    def _finish_checkpoint(self) -> None:
        if self.pending is not None and self.pending[0] <= self.now:
            self.written.append(self.pending)
            self.saved, self.pending = self.pending[1], None
            while len(self.written) > 1 and self.written[1][0] <= self.now - self.scenario.pauses.notice:
                self.written.popleft()

    def _apply_change(self, failed: Nodes, joined: Nodes, cause: NodeChange | None = None) -> None:
        change = self.system.change(self.at_full_speed, failed, joined)
        self._finish_checkpoint()
        if cause and cause.is_announced(failed):
            if change.loss is Loss.CHECKPOINT:
                self.pending = self.now, self.work
                self._finish_checkpoint()
            change = replace(change, loss=Loss.NOTHING, pause=replace(change.pause, detect=0.0))
        elif cause and cause.is_corruption(failed):
            change = self._undo_corruption(change)
        if failed:
            self.pending = None  # parts of the checkpoint were on the failed nodes
            self.stall = 0.0
        if change.loss is not Loss.NOTHING or isinstance(change.state, Stopped):
            self._book_redone(self.partial)
            self.phase = self.partial = 0.0
        if change.loss is Loss.CHECKPOINT:
            self._book_redone(self.work.kept - self.saved.kept)
            self.work = replace(self.saved, kept=self.work.kept)
            self.since = 0
        pause = change.pause.by_cause()
        if self.pause_left:
            pause = {cause: max(seconds, self.pause[cause]) for cause, seconds in pause.items()}
        self.pause = pause
        self.pause_left = {cause: seconds for cause, seconds in pause.items() if seconds > 0}
        self.bytes += change.bytes
        self._adopt(change.state)
        if isinstance(self.state, Stopped):
            self.pause, self.pause_left = {}, {}
        self._record_transition(change.event, failed, joined, sum(self.pause.values(), 0.0))

    def _undo_corruption(self, change: Change) -> Change:
        state = self.at_full_speed
        if isinstance(state, Stopped):
            return change
        unnoticed = getattr(self.system, "unnoticed", lambda state: 0.0)(state)
        if not unnoticed:
            while self.written and self.written[-1][0] > self.now - self.scenario.pauses.notice:
                self.written.pop()
            self.saved = self.written[-1][1] if self.written else _Work()
            return replace(change, loss=Loss.CHECKPOINT, pause=self.scenario.restart())
        kept = self.work.kept - self.partial
        spoiled = min(unnoticed, kept)
        samples = spoiled / state.period * state.samples
        self.saved = replace(self.work, committed=self.work.committed - samples, kept=kept - spoiled)
        return replace(change, loss=Loss.CHECKPOINT)

    def _book_redone(self, seconds: float) -> None:
        self.work = replace(self.work, kept=self.work.kept - seconds)
        self.lost["redone"] += seconds

    def _record_transition(self, event: str, failed: Nodes, joined: Nodes, pause: float) -> None:
        self.transitions.append(Transition(self.now, event, failed, joined, pause, self.state))

    def outcome(self, fault_free: float) -> Outcome:
        """Close the accounts: remaining training time without progress was slower than fault-free."""
        work = self.work
        if fault_free:
            self.lost["dropped"] = work.dropped / fault_free
            slower = work.kept - work.committed / fault_free - self.lost["dropped"]
            self.lost["idle"] = min(max(0.0, slower), work.idle)
            self.lost["degraded"] = slower - self.lost["idle"]
        return Outcome(
            self.system.name,
            self.trace.name,
            self.trace.end,
            self.scenario.gpus,
            work.committed,
            fault_free,
            self.lost,
            work.dropped,
            self.bytes,
            tuple(self.transitions),
        )
