"""Failure detector: finds dead and hung workers by heartbeats and selects the worker to fence after a network cut.

A heartbeat tells the main thread's progress, the current operation, and the longest recent duration of that operation
in this process. An operation counts as hung after a multiple of that duration; its first run, which may compile, load
or warm up, has a longer limit. A worker that waits for others never counts as hung; see `standstill`.

Silence counts only while the leader itself runs. The silence of the median process is subtracted, up to a second
deadline, because workers of an overloaded machine starve together.
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
"""One `BEAT` row per process of a job, in the order of the job's members."""
BEAT = np.dtype([("beats", "i8"), ("progress", "i8"), ("waiting", "?"), ("doing", "U20"), ("longest", "f8")])
"""The attributes of `Heartbeat`, in order; `longest` is NaN where the attribute is None."""
_NO_BEAT = Heartbeat(-1, -1, True, "start", None)


class FailureDetector:
    """Judges the heartbeats of a run. Columns hold one row per process, in the order of the process names.

    Args:
        job: the `[membership]` section has every deadline.
        runs_script: the processes run a user's script, which may import and load before the first heartbeat.

    Attributes:
        beats: last heartbeat of each process; the counter `beats` is -1 before the first.
        are_due: judge heartbeats now; agents have had time to send newer ones.
    """

    def __init__(self, job: PricedJob, runs_script: bool = False) -> None:
        self._limits, self._ranks, self._processes = job.membership, job.shape.ranks, job.grid.tensor_parallel
        self._profiled = profiled_seconds(job)
        self._warm_up = max(self._limits.warm_up, self._limits.dead_after)
        self._start = max(self._limits.start_deadline, self._warm_up) if runs_script else self._warm_up
        members = members_of(job.shape.workers(), self._processes)
        count = len(members)
        self._places = {member: place for place, member in enumerate(members)}
        self.beats: Beats = np.full(count, np.array(astuple(_NO_BEAT), BEAT))
        self.are_due = True
        self._last = np.zeros(count, BEAT)
        self._since = np.zeros((3, count))
        # Times of the last heartbeat, of the last progress or wait, and of the last progress.
        self._changed, self._progressed, self._advanced = self._since
        self._patience = np.zeros(count)
        self._is_watched, self._is_heard = np.zeros(count, bool), np.zeros(count, bool)
        self._judged_at = 0.0
        self._cached_places: tuple[Collection[Worker], Integers] = frozenset(), np.zeros(0, np.int64)

    def take(self, heartbeats: Mapping[str, Heartbeat]) -> None:
        """Take heartbeats by process name; heartbeats of unknown processes are ignored."""
        for member, beat in heartbeats.items():
            if (place := self._places.get(member)) is not None:
                if not self._is_heard[place] and self.beats["beats"][place] not in (_NO_BEAT.beats, beat.beats):
                    self._last[place] = self.beats[place]  # several heartbeats arrive at once
                self.beats[place] = astuple(beat)

    def end(self, members: Iterable[str]) -> None:
        self.take(dict.fromkeys(members, _NO_BEAT))

    def _places_of(self, workers: Collection[Worker]) -> Integers:
        if self._cached_places[0] != workers:
            firsts = worker_indices(workers, self._ranks) * self._processes
            self._cached_places = frozenset(workers), (firsts[:, None] + np.arange(self._processes)).ravel()
        return self._cached_places[1]

    def lost(
        self, live: Collection[Worker], now: float, done: Collection[str] = (), *, is_starting: bool = False
    ) -> dict[Worker, str]:
        """Return lost workers with the cause: a process has no heartbeat, or no progress while it has work.

        If heartbeats are not due, no worker is judged, and the time does not count.

        Args:
            now: monotonic seconds.
            done: finished processes, which may be silent.
            is_starting: the workers start up. Silence is allowed up to `warm_up`, and before a script's second
                heartbeat up to `start_deadline`.
        """
        if not self.are_due:
            return {}
        late = max(0.0, now - self._judged_at - self._limits.heartbeat)
        self._judged_at = now
        self._since += late
        watched = self._places_of(live)
        if done:
            watched = watched[~np.isin(watched, [self._places[name] for name in done])]
        self._watch(watched[~self._is_watched[watched]], now)
        self._take(watched, now)
        silence = now - self._changed[watched]
        allowed, dead_after = self._common_silence(silence), np.full(len(watched), self._limits.dead_after)
        if is_starting:
            dead_after = np.where(self._is_heard[watched], self._warm_up, self._patience[watched])
        is_dead = silence > dead_after + allowed
        is_lost = is_dead | (now - self._progressed[watched] > self._patience[watched] + allowed)
        lost: dict[Worker, str] = {}
        for at in is_lost.nonzero()[0]:
            place = int(watched[at])
            worker, rank = divmod(place, self._processes)
            cause = f"no heartbeat for {dead_after[at]:g} s"
            if not is_dead[at]:
                cause = f"no progress for {self._patience[place]:g} s in {self._last['doing'][place]}"
            cause = f"tensor rank {rank}: {cause}" if rank else cause
            lost.setdefault(Worker(*divmod(worker, self._ranks)), cause)
        return lost

    def _watch(self, fresh: Integers, now: float) -> None:
        self._since[:, fresh] = now
        self._patience[fresh] = self._start
        self._last[fresh] = np.array(astuple(_NO_BEAT), BEAT)
        self._is_watched[fresh], self._is_heard[fresh] = True, False

    def _take(self, places: Integers, now: float) -> None:
        beats = self.beats
        counts = beats["beats"][places]
        places = places[(counts != self._last["beats"][places]) & (counts >= 0)]
        before, beats = self._last[places], beats[places]
        # The first heartbeat seen of a process may be a leftover of its predecessor.
        is_later = before["beats"] >= 0
        advanced = is_later & (beats["progress"] != before["progress"])
        self._advanced[places[advanced]] = now
        self._progressed[places[advanced | (is_later & beats["waiting"])]] = now
        self._changed[places[is_later]], self._is_heard[places[is_later]] = now, True
        self._patience[places[is_later]] = self.patience(beats["longest"][is_later])
        self._last[places] = beats

    def standstill(self, live: Collection[Worker]) -> float:
        """Seconds for which all processes of the workers have waited without progress, when last judged."""
        places = self._places_of(live)
        if not len(places) or not self._last["waiting"][places].all():
            return 0.0
        return max(0.0, self._judged_at - float(self._advanced[places].max()))

    def stuck(self, live: Collection[Worker], seconds: float) -> set[Worker]:
        """Workers with a process that does not wait and has made no progress for `seconds`, when last judged."""
        places = self._places_of(live)
        is_stuck = ~self._last["waiting"][places] & (self._judged_at - self._advanced[places] > seconds)
        numbers = (places[is_stuck] // self._processes).tolist()
        return {Worker(*divmod(number, self._ranks)) for number in numbers}

    def _common_silence(self, silences: Floats) -> float:
        """An overdue median process means that half of the processes wait for a core."""
        if len(silences) < 2:
            return 0.0
        middle = (len(silences) - 1) // 2
        overdue = float(np.partition(silences, middle)[middle]) - self._limits.heartbeat
        return min(max(0.0, overdue), self._limits.dead_after)

    def patience(self, longest: npt.ArrayLike) -> Floats:
        """Seconds before operations count as hung, by longest recent duration (NaN for the first)."""
        limits = self._limits
        first = max(limits.hung_after, limits.warm_up, limits.hung_factor * self._profiled)
        usual = np.maximum(limits.hung_after, limits.hung_factor * np.asarray(longest))
        return np.where(np.isnan(longest), first, usual)

    def patience_with(self, worker: Worker) -> float:
        """Seconds that the worker's current operation may take, by its last heartbeat."""
        places = self._places_of([worker])
        patience = self._patience[places[self._is_watched[places]]]
        return float(patience.max()) if len(patience) else self._limits.warm_up

    def forget(self, workers: Collection[Worker]) -> None:
        """Reset the workers' heartbeats, because new processes follow or the old ones are judged from the start."""
        self._is_watched[self._places_of(workers)] = False

    def connected(self, workers: Collection[Worker], now: float) -> None:
        """Count silence from now on: the agent of the workers has connected."""
        self._changed[self._places_of(workers)] = now

    def is_silent(self, worker: Worker, now: float) -> bool:
        """Whether a process of the worker has been silent for over half of `dead_after`."""
        places = self._places_of([worker])
        is_overdue = now - self._changed[places] > self._limits.dead_after / 2
        return bool((is_overdue & self._is_watched[places]).any())


def profiled_seconds(job: PricedJob) -> float:
    """Duration of the longest instruction by the job's profile; 0 if `[times]` is not in seconds."""
    scale = job.seconds_per_unit
    if scale is None:
        return 0.0
    profile, stages = job.prices, job.shape.stages
    names = ("backward_input", "backward_weight")
    backward = map(sum, zip(*(profile.per_stage(name, stages) for name in names), strict=True))
    return scale * max(*profile.per_stage("forward", stages), *backward, *profile.per_stage("step", stages))


def select_fenced(
    pair: Sequence[Worker],
    live: Collection[Worker],
    suspects: Collection[Worker] = (),
    hosts: Mapping[Worker, int] | None = None,
) -> Worker | None:
    """Select which of two workers that cannot reach each other to fence.

    Prefer a suspect, then a joining worker without state, then the worker whose state has more live hosts, then
    the later position. A last host is never fenced: return None if both are last hosts.

    Args:
        live: the workers that hold state.
        suspects: those that are silent, or that others cannot reach either.
        hosts: worker -> number of live hosts of its rarest unit; None for the number of hosts of its rank.
    """
    if hosts is None:
        hosts = {worker: sum(peer.rank == worker.rank for peer in live) for worker in pair}
    candidates = [worker for worker in pair if worker not in live or hosts[worker] > 1]
    return max(candidates, key=lambda w: (w in suspects, w not in live, hosts[w], w), default=None)
