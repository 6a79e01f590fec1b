"""The failure detector: finds dead and hung workers in the heartbeats, and says whom to fence when two are cut off.

A heartbeat comes from a thread that only sends a message to the agent: the thread stands still when the process
does, or when something holds the interpreter lock. It tells how far the main thread is, what it is doing, and the
longest that such an operation has taken this process lately. So a hang shows when the operation at hand lasts a
multiple of that, on any model and machine; before it has been done once, it may compile, load or warm up, and more
patience is due. A worker that waits for others never counts as hung; the worker that it waits for may. Where all wait,
none of them can be blamed: `standstill` says for how long they have.

A silence counts only while the leader itself ran, because a machine that starves it starves the workers. Nor does
it count as far as the median process is silent too, up to a second deadline, because many workers on few cores starve
together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from recycle.exec.leader.metrics import Floats, Integers, worker_indices
from recycle.exec.members import members_of
from recycle.exec.protocol import Heartbeat
from recycle.job import PricedJob
from recycle.job.shape import Worker

Beats = npt.NDArray[np.void]
"""A row of `BEAT` for each process of a job, in the order of the job's members."""
BEAT = np.dtype([("beats", "i8"), ("progress", "i8"), ("waiting", "?"), ("doing", "U20"), ("longest", "f8")])
"""The attributes of `Heartbeat`, in their order; `longest` is NaN where it is None."""
_NO_BEAT = Heartbeat(-1, -1, True, "start", None)


class FailureDetector:
    """Judges the heartbeats of a run. What it knows of each process is a row of columns, in the order of their names.

    Args:
        job: its `[membership]` section holds every deadline.

    Attributes:
        beats: the last heartbeat of each process; its `beats` are -1 before the first.
        are_due: they are to be judged now, as agents have had the time to send newer ones.
    """

    def __init__(self, job: PricedJob) -> None:
        self._limits, self._ranks, self._processes = job.membership, job.shape.ranks, job.grid.tensor_parallel
        self._profiled = profiled_seconds(job)
        members = members_of(job.shape.workers(), self._processes)
        count = len(members)
        self._places = {member: place for place, member in enumerate(members)}
        self.beats: Beats = np.full(count, np.array(astuple(_NO_BEAT), BEAT))
        self.are_due = True
        self._last = np.zeros(count, BEAT)
        self._since = np.zeros((3, count))
        # When a heartbeat came, when it told of progress or of waiting, and when of progress.
        self._changed, self._progressed, self._advanced = self._since
        self._patience = np.zeros(count)
        self._is_watched = np.zeros(count, bool)
        self._looked = 0.0
        self._found: tuple[Collection[Worker], Integers] = frozenset(), np.zeros(0, np.int64)

    def take(self, heartbeats: Mapping[str, Heartbeat]) -> None:
        """Processes, by their names, have sent these. Those of unknown processes are ignored."""
        for member, beat in heartbeats.items():
            if (place := self._places.get(member)) is not None:
                self.beats[place] = astuple(beat)

    def end(self, members: Iterable[str]) -> None:
        """These processes have ended."""
        self.take(dict.fromkeys(members, _NO_BEAT))

    def _places_of(self, workers: Collection[Worker]) -> Integers:
        """Places of the workers' processes; those of a set are remembered until another one comes."""
        if self._found[0] != workers:
            firsts = worker_indices(workers, self._ranks) * self._processes
            self._found = frozenset(workers), (firsts[:, None] + np.arange(self._processes)).ravel()
        return self._found[1]

    def lost(
        self, live: Collection[Worker], now: float, done: Collection[str] = (), *, is_starting: bool = False
    ) -> dict[Worker, str]:
        """Workers with a process without heartbeat, or without progress while it has work, each with why.

        Where heartbeats are not due nobody is judged, and the time counts for nobody.

        Args:
            now: monotonic seconds.
            done: processes that have nothing more to do, and may be silent.
            is_starting: the workers start up, in which imports may hold the interpreter lock: they may be silent for as
                long as that takes.
        """
        if not self.are_due:
            return {}
        dead_after = max(self._limits.warm_up, self._limits.dead_after) if is_starting else self._limits.dead_after
        late = max(0.0, now - self._looked - self._limits.heartbeat)
        self._looked = now
        self._since += late
        watched = self._places_of(live)
        if done:
            watched = watched[~np.isin(watched, [self._places[name] for name in done])]
        self._watch(watched[~self._is_watched[watched]], now)
        self._take(watched, now)
        silence = now - self._changed[watched]
        allowed = self._common_silence(silence)
        is_dead = silence > dead_after + allowed
        is_lost = is_dead | (now - self._progressed[watched] > self._patience[watched] + allowed)
        lost: dict[Worker, str] = {}
        for place, is_silent in sorted(zip(watched[is_lost].tolist(), is_dead[is_lost].tolist(), strict=True)):
            worker, rank = divmod(place, self._processes)
            cause = f"no heartbeat for {dead_after:g} s"
            if not is_silent:
                cause = f"no progress for {self._patience[place]:g} s in {self._last['doing'][place]}"
            cause = f"tensor rank {rank}: {cause}" if rank else cause
            lost.setdefault(Worker(*divmod(worker, self._ranks)), cause)
        return lost

    def _watch(self, fresh: Integers, now: float) -> None:
        """Processes that are watched for the first time have time to start."""
        self._since[:, fresh] = now
        self._patience[fresh] = max(self._limits.warm_up, self._limits.dead_after)
        self._last[fresh] = np.array(astuple(_NO_BEAT), BEAT)
        self._is_watched[fresh] = True

    def _take(self, places: Integers, now: float) -> None:
        """Take the beats that are new."""
        beats = self.beats
        counts = beats["beats"][places]
        places = places[(counts != self._last["beats"][places]) & (counts >= 0)]
        before, beats = self._last[places], beats[places]
        # The first that is seen of a process may be the last that the one before it has left.
        is_later = before["beats"] >= 0
        advanced = is_later & (beats["progress"] != before["progress"])
        self._advanced[places[advanced]] = now
        self._progressed[places[advanced | (is_later & beats["waiting"])]] = now
        self._changed[places[is_later]] = now
        self._patience[places[is_later]] = self.patience(beats["longest"][is_later])
        self._last[places] = beats

    def standstill(self, live: Collection[Worker]) -> float:
        """Seconds for which all processes of the workers have waited and none has made progress, when last judged."""
        places = self._places_of(live)
        if not len(places) or not self._last["waiting"][places].all():
            return 0.0
        return max(0.0, self._looked - float(self._advanced[places].max()))

    def stuck(self, live: Collection[Worker], seconds: float) -> set[Worker]:
        """Workers with a process that does not wait and has made no progress for so long, when last judged."""
        places = self._places_of(live)
        is_stuck = ~self._last["waiting"][places] & (self._looked - self._advanced[places] > seconds)
        numbers = (places[is_stuck] // self._processes).tolist()
        return {Worker(*divmod(number, self._ranks)) for number in numbers}

    def _common_silence(self, silences: Floats) -> float:
        """Seconds that the median process is overdue, up to `dead_after`: half of them then wait for a core."""
        if len(silences) < 2:
            return 0.0
        middle = (len(silences) - 1) // 2
        overdue = float(np.partition(silences, middle)[middle]) - self._limits.heartbeat
        return min(max(0.0, overdue), self._limits.dead_after)

    def patience(self, longest: npt.ArrayLike) -> Floats:
        """Seconds that operations may take before they count as hung.

        Args:
            longest: seconds that such ones have taken lately, not a number for the process's first.
        """
        limits = self._limits
        first = max(limits.hung_after, limits.warm_up, limits.hung_factor * self._profiled)
        usual = np.maximum(limits.hung_after, limits.hung_factor * np.asarray(longest))
        return np.where(np.isnan(longest), first, usual)

    def patience_with(self, worker: Worker) -> float:
        """Seconds that the worker's operation may take, by its last heartbeat."""
        places = self._places_of([worker])
        found = self._patience[places[self._is_watched[places]]]
        return float(found.max()) if len(found) else self._limits.warm_up

    def forget(self, workers: Collection[Worker]) -> None:
        """The next heartbeats of these workers come from other processes, or are judged anew."""
        self._is_watched[self._places_of(workers)] = False

    def is_silent(self, worker: Worker, now: float) -> bool:
        """Whether a heartbeat is well overdue, though not long enough to be dead."""
        places = self._places_of([worker])
        is_overdue = now - self._changed[places] > self._limits.dead_after / 2
        return bool((is_overdue & self._is_watched[places]).any())


def profiled_seconds(job: PricedJob) -> float:
    """The longest instruction by the job's profile; 0 when `[times]` is not in seconds."""
    scale = job.seconds_per_unit
    if scale is None:
        return 0.0
    profile, stages = job.prices, job.shape.stages
    names = ("backward_input", "backward_weight")
    backward = map(sum, zip(*(profile.per_stage(name, stages) for name in names), strict=True))
    return scale * max(*profile.per_stage("forward", stages), *backward, *profile.per_stage("step", stages))


def whom_to_fence(
    pair: Sequence[Worker],
    live: Collection[Worker],
    silent: Collection[Worker] = (),
    hosts: Mapping[Worker, int] | None = None,
) -> Worker | None:
    """Which of two workers that cannot reach each other to fence, so that the other can go on.

    A worker that is silent, if any; else one that joins and has no state yet; else the one whose state has more live
    hosts, because its loss costs less; of equals the later position. Never a last host: None when both are.

    Args:
        live: the workers that hold state.
        hosts: worker -> live hosts of the unit of its state that has fewest; those of its rank when left out.
    """
    if hosts is None:
        hosts = {worker: sum(peer.rank == worker.rank for peer in live) for worker in pair}
    candidates = [worker for worker in pair if worker not in live or hosts[worker] > 1]
    return max(candidates, key=lambda w: (w in silent, w not in live, hosts[w], w), default=None)
