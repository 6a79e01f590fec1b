"""The cluster: one system over one failure trace, by discrete events, for days or years.

Training is a row of iterations of `Running.period` seconds; what is committed counts and nothing else. A failure
strikes at once, in the middle of an iteration, of a checkpoint or of a pause. One inside a pause begins it again: per
cause the longer of the two, since what was being copied or started is needed still. Nodes that come back are usable
after `[pauses] start` and are let in at the next boundary of two iterations.

Every second is booked once: as progress (at the fault-free rate) or under the cause that took it, so that the time is
their sum. No loop runs over iterations; a year of 400 nodes is a few thousand changes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import floor, inf

from recycle.systems.failures import FailureTrace, mean_per_part
from recycle.systems.setting import Setting
from recycle.systems.system import Checkpoints, DoesNotFit, Loss, Nodes, Pause, Running, State, Stopped, System

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
"""What time is lost to. `redone`: work that a failure took. `dropped`: work on a batch of which samples are left out.
`idle`: live workers with nothing to do. `degraded`: the rest, workers that are not there; with what the end of the
trace cut off."""
_TOLERANCE = 1e-6
"""Of an iteration: what is so close to its end is there."""
ShareProgress = Callable[[float], None]


@dataclass(frozen=True)
class Transition:
    """A change of the live set, or of what runs on it, as it was carried out.

    Attributes:
        time: seconds.
        event: what the system did; "start" for the first.
        failed, joined: nodes.
        pause: seconds that follow, unless another failure strikes in them.
        committed: samples that are committed, after what the change took back.
        state: what runs after the pause.
    """

    time: float
    event: str
    failed: Nodes
    joined: Nodes
    pause: float
    committed: float
    state: State


@dataclass(frozen=True)
class Outcome:
    """What a system made of a trace.

    Attributes:
        system, trace: names.
        seconds: length.
        samples: committed, and not taken back.
        fault_free: samples per second with every node alive and no checkpoint written.
        lost: cause -> seconds; with `samples / fault_free` they sum to `seconds`.
        dropped: samples of committed iterations that were left out of the batch.
        bytes: copied over the network.
        gpus: of the job, dead or alive: all are paid for.
        transitions: by time.
        misfit: why the job does not fit into memory; all figures are 0 then.
        copies: of each part of the optimizer's state; 0 where every host of a stage has all of it.
    """

    system: str
    trace: str
    seconds: float
    samples: float
    fault_free: float
    lost: dict[str, float]
    dropped: float
    bytes: float
    gpus: int
    transitions: tuple[Transition, ...] = ()
    misfit: DoesNotFit | None = None
    copies: int = 0

    @property
    def goodput(self) -> float:
        """Committed samples per second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the share of the time that fault-free training would have needed."""
        return self.goodput / self.fault_free if self.fault_free else 0.0

    @property
    def gpu_seconds_per_sample(self) -> float:
        """The cost of a sample; infinite where none was committed."""
        return self.gpus * self.seconds / self.samples if self.samples else inf

    def rates(self, parts: int) -> list[float]:
        """Mean samples per second in each of so many equal parts of the time; what was taken back later included."""
        steps: list[tuple[float, float]] = []
        for transition, after in zip(self.transitions, [*self.transitions[1:], None], strict=True):
            until = self.seconds if after is None else after.time
            state = transition.state
            steps.append((transition.time, 0.0))
            if isinstance(state, Running) and transition.time + transition.pause < until:
                steps.append((transition.time + transition.pause, state.samples / state.period))
        return mean_per_part(steps, self.seconds, parts)

    @property
    def events(self) -> dict[str, int]:
        """How often the system did what."""
        return dict(Counter(transition.event for transition in self.transitions))


def run(
    system: System,
    setting: Setting,
    trace: FailureTrace,
    seconds: float | None = None,
    progress: ShareProgress | None = None,
) -> Outcome:
    """Run a system over a trace that was fitted to the setting's nodes.

    Args:
        seconds: to stop at (or go on to, with no further failures); the end of the trace if left out.
        progress: told the share that is done.

    Raises:
        ValueError: the trace has another number of nodes.
    """
    if trace.nodes != setting.nodes:
        raise ValueError(
            f"the trace is for {trace.nodes} nodes, the setting has {setting.nodes}: use FailureTrace.fitted"
        )
    until = trace.end if seconds is None else seconds
    whole = system.begin(setting.all_nodes)
    if isinstance(whole, DoesNotFit):
        empty = dict.fromkeys(CAUSES, 0.0)
        return Outcome(system.name, trace.name, until, 0.0, 0.0, empty, 0.0, 0.0, setting.gpus, misfit=whole)
    cluster = _Cluster(system, setting, trace)
    cluster.play(until, progress)
    return cluster.outcome(until, whole.samples / whole.period if isinstance(whole, Running) else 0.0)


@dataclass(frozen=True)
class _Saved:
    """A checkpoint: samples committed by then, and seconds of training that went into them."""

    committed: float = 0.0
    kept: float = 0.0
    idle: float = 0.0
    dropped: float = 0.0
    ready: float = 0.0


@dataclass
class _Cluster:
    """The clock and the books."""

    system: System
    setting: Setting
    trace: FailureTrace
    now: float = 0.0
    state: State = field(init=False)
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    committed: float = 0.0
    dropped: float = 0.0
    kept: float = 0.0  # seconds of training whose work still counts
    idle: float = 0.0  # of these, times the share of slots that are idle
    phase: float = 0.0  # share of the iteration in progress that is done
    partial: float = 0.0  # seconds that went into it
    since: int = 0  # iterations since the last checkpoint
    stall: float = 0.0  # seconds left of the checkpoint that is being taken
    saved: _Saved = _Saved()
    pending: _Saved | None = None  # taken, but not complete before `ready`
    pause: Pause = field(default_factory=Pause)
    pause_left: dict[str, float] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    bytes: float = 0.0
    transitions: list[Transition] = field(default_factory=list)

    def play(self, until: float, progress: ShareProgress | None) -> None:
        """All events up to `until`."""
        changes = self.trace.changes
        up, first = set(self.trace.up), 0
        while first < len(changes) and changes[first].time <= 0:
            up = up - changes[first].failed | changes[first].joined
            first += 1
        begun = self.system.begin(frozenset(up))
        self.state = begun if not isinstance(begun, DoesNotFit) else Stopped(live=frozenset(up), reason=begun.reason)
        self._record("start", frozenset(), frozenset(up), 0.0)
        comes: list[tuple[float, int]] = []  # when nodes that came are usable
        due: dict[int, float] = {}
        for number, change in enumerate(changes[first:]):
            if change.time >= until:
                break
            self._usable(comes, due, change.time)
            self._until(change.time)
            for node in change.failed:
                due.pop(node, None)
            self.waiting -= change.failed
            struck = change.failed & self.state.live
            if struck:
                self._change(struck, frozenset())
            for node in change.joined:
                due[node] = change.time + self.setting.pauses.start
                heapq.heappush(comes, (due[node], node))
            if progress and number % 64 == 0:
                progress(change.time / until)
        self._usable(comes, due, until)
        self._until(until)

    def _usable(self, comes: list[tuple[float, int]], due: dict[int, float], until: float) -> None:
        """Time goes on to each node that becomes usable before `until`."""
        while comes and comes[0][0] <= until:
            time, node = heapq.heappop(comes)
            if due.get(node) == time:
                del due[node]
                self._until(time)
                self.waiting.add(node)

    def _until(self, time: float) -> None:
        """The clock goes on; changes at boundaries happen on the way."""
        while self.now < time:
            if self.pause_left:
                self._rest(time)
            elif isinstance(self.state, Stopped):
                if self.waiting:
                    self._let_in()
                else:
                    self.lost["stopped"] += time - self.now
                    self.now = time
            elif self.waiting or self.state.reconsider:
                left = self.stall or ((1 - self.phase) * self.state.period if self.phase else 0.0)
                if left and self.now + left == self.now:  # too short for the clock
                    self._commit(self.state, 1)
                    self.phase = self.partial = self.stall = 0.0
                self._train(self.state, min(time, self.now + left))
                if self.phase * self.state.period <= _TOLERANCE and not self.stall:
                    self._let_in()
            else:
                self._train(self.state, time)

    def _let_in(self) -> None:
        joined = frozenset(self.waiting)
        self.waiting.clear()
        self._change(frozenset(), joined)

    def _rest(self, time: float) -> None:
        """A pause passes, cause by cause."""
        for cause, left in list(self.pause_left.items()):
            passed = min(left, time - self.now)
            self.lost[cause] += passed
            self.now += passed
            if passed < left:
                self.pause_left[cause] = left - passed
                self.now = time
                return
            del self.pause_left[cause]

    def _train(self, state: Running, time: float) -> None:
        """Iterations and checkpoints up to `time`."""
        idle = state.idle / max(1, len(self.setting.node_of))
        every = self._iterations_per_checkpoint(state.checkpoints, state.period)
        while self.now < time:
            if self.stall:
                passed = min(self.stall, time - self.now)
                self.lost["checkpoint"] += passed
                self.now += passed
                self.stall -= passed
                if not self.stall:
                    self._take(state)
                continue
            room = time - self.now
            cycle = every * state.period + state.checkpoints.stall if state.checkpoints else inf
            if not self.phase and not self.since and room >= 2 * cycle and state.checkpoints is not None:
                cycles = int(room // cycle) - 1  # of iterations and a checkpoint; the last one is taken step by step
                self._commit(state, cycles * int(every))
                self._spend(cycles * every * state.period, idle)
                self.lost["checkpoint"] += cycles * state.checkpoints.stall
                self.now += cycles * cycle
                self._take(state)
                continue
            left = (max(1, every - self.since) - self.phase) * state.period
            if left <= room + _TOLERANCE * state.period and state.checkpoints is not None:
                self._commit(state, max(1, int(every) - self.since))
                self._spend(min(left, room), idle)
                self.now += min(left, room)
                self.phase = self.partial = 0.0
                self.stall = state.checkpoints.stall
                if not self.stall:
                    self._take(state)
                continue
            reached = self.phase + room / state.period
            done = floor(reached + _TOLERANCE)
            self._commit(state, done)
            self._spend(room, idle)
            self.phase = max(0.0, reached - done)
            self.partial = self.phase * state.period if done else self.partial + room
            self.now = time

    @staticmethod
    def _iterations_per_checkpoint(checkpoints: Checkpoints | None, period: float) -> float:
        """Iterations between two checkpoints."""
        return inf if checkpoints is None else max(1, round(checkpoints.every / period))

    def _commit(self, state: Running, iterations: int) -> None:
        self.committed += iterations * state.samples
        self.dropped += iterations * state.dropped
        self.since += iterations

    def _spend(self, seconds: float, idle: float) -> None:
        self.kept += seconds
        self.idle += seconds * idle

    def _take(self, state: Running) -> None:
        """A checkpoint of what is committed is taken; it counts `lag` seconds from now."""
        self._complete()
        assert state.checkpoints is not None
        ready = self.now + state.checkpoints.lag
        self.pending = _Saved(self.committed, self.kept, self.idle, self.dropped, ready)
        self.since = 0
        self._complete()

    def _complete(self) -> None:
        if self.pending is not None and self.pending.ready <= self.now:
            self.saved, self.pending = self.pending, None

    def _change(self, failed: Nodes, joined: Nodes) -> None:
        before = self.state
        change = self.system.change(before, failed, joined)
        self._complete()
        if failed:
            self.pending = None  # parts of it were on the failed nodes
            self.stall = 0.0
        if change.loss is not Loss.NOTHING or isinstance(change.state, Stopped):
            self._redo(self.partial)
            self.phase = self.partial = 0.0
        if change.loss is Loss.CHECKPOINT:
            self._redo(self.kept - self.saved.kept)
            self.committed, self.dropped, self.idle = self.saved.committed, self.saved.dropped, self.saved.idle
            self.since = 0
        pause = change.pause.by_cause()
        if self.pause_left:
            again = self.pause.by_cause()
            pause = {cause: max(seconds, again[cause]) for cause, seconds in pause.items()}
        self.pause = Pause(**pause)
        self.pause_left = {cause: seconds for cause, seconds in pause.items() if seconds > 0}
        self.bytes += change.bytes
        self.state = change.state
        if isinstance(self.state, Stopped):
            self.pause, self.pause_left = Pause(), {}
        self._record(change.event, failed, joined, self.pause.seconds)

    def _redo(self, seconds: float) -> None:
        self.kept -= seconds
        self.lost["redone"] += seconds

    def _record(self, event: str, failed: Nodes, joined: Nodes, pause: float) -> None:
        self.transitions.append(Transition(self.now, event, failed, joined, pause, self.committed, self.state))

    def outcome(self, until: float, fault_free: float) -> Outcome:
        """Close the books: what training time is not progress was slower than fault-free."""
        if fault_free:
            self.lost["dropped"] = self.dropped / fault_free
            slower = self.kept - self.committed / fault_free - self.lost["dropped"]
            self.lost["idle"] = min(max(0.0, slower), self.idle)
            self.lost["degraded"] = slower - self.lost["idle"]
        return Outcome(
            self.system.name,
            self.trace.name,
            until,
            self.committed,
            fault_free,
            self.lost,
            self.dropped,
            self.bytes,
            self.setting.gpus,
            tuple(self.transitions),
        )
