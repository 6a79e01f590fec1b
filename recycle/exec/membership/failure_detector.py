"""The failure detector: finds dead and hung workers in the heartbeats, and says whom to fence when two are cut off.

A heartbeat comes from a thread of its own, which only writes a line to the store: it stands still when the process
does, or when something holds the interpreter lock. It tells how far the main thread is, what it is doing, and the
longest that such an operation has taken this process lately. So a hang shows when the operation at hand lasts a
multiple of that, on any model and machine; before it has been done once, it may compile, load or warm up, and more
patience is due. A worker that waits for others never counts as hung; the worker that it waits for may.

A silence counts only while the coordinator itself ran, because a machine that starves it starves the workers. Nor does
it count as far as the median process is silent too, up to a second deadline, because many workers on few cores starve
together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median_low

from recycle.exec.membership.members import member_name
from recycle.exec.membership.messages import Heartbeat
from recycle.job import PricedJob
from recycle.shape import Worker

ReadHeartbeats = Callable[[Sequence[str]], Sequence[Heartbeat | None] | None]


@dataclass
class _Heard:
    changed: float
    progressed: float
    patience: float
    last: Heartbeat = Heartbeat(-1, -1, True, "start", None)  # noqa: RUF009  frozen


class FailureDetector:
    """Judges the heartbeats of a run.

    Args:
        job: its `[membership]` section holds every deadline.
        dead_after: seconds without a heartbeat, in place of that section's.
    """

    def __init__(self, job: PricedJob, dead_after: float | None = None) -> None:
        self._limits = job.membership
        self._dead_after = job.membership.dead_after if dead_after is None else dead_after
        self._profiled = profiled_seconds(job)
        self._names = {
            worker: [member_name(worker, rank) for rank in range(job.grid.tensor_parallel)]
            for worker in job.shape.workers()
        }
        self._beats: dict[str, _Heard] = {}
        self._looked = 0.0

    def lost(
        self,
        live: Collection[Worker],
        read: ReadHeartbeats,
        now: float,
        done: Collection[str] = (),
    ) -> dict[Worker, str]:
        """Workers with a process without heartbeat, or without progress while it has work, each with why.

        Args:
            read: the last heartbeats of processes, by their names; None before the first. None for all when none were
                read since the last call: then nobody is judged, and the time counts for nobody.
            now: monotonic seconds.
            done: processes that have nothing more to do, and may be silent.
        """
        limits = self._limits
        late = max(0.0, now - self._looked - limits.heartbeat)
        watched: list[tuple[Worker, int, _Heard]] = []
        due: dict[str, _Heard] = {}
        for worker, rank, name in ((w, rank, name) for w in live for rank, name in enumerate(self._names[w])):
            if name in done:
                continue
            if (beat := self._beats.get(name)) is None:
                beat = _Heard(now - late, now - late, max(limits.warm_up, self._dead_after))
                self._beats[name] = beat
            watched.append((worker, rank, beat))
            if now - beat.changed - late >= limits.heartbeat / 2 or beat.last.beats < 0:
                due[name] = beat
        found = read(list(due))
        if found is None:
            return {}
        self._looked = now
        if late:
            for beat in self._beats.values():
                beat.changed += late
                beat.progressed += late
        for beat, heartbeat in zip(due.values(), found, strict=True):
            if heartbeat is None or heartbeat == beat.last:
                continue
            if beat.last.beats >= 0:  # else it may be the last that the process before this one has left
                if heartbeat.progress != beat.last.progress or heartbeat.waiting:
                    beat.progressed = now
                beat.changed, beat.patience = now, self.patience(heartbeat.longest)
            beat.last = heartbeat
        starved = self._common_silence([now - beat.changed for _, _, beat in watched])
        lost: dict[Worker, str] = {}
        for worker, rank, beat in watched:
            if now - beat.changed > self._dead_after + starved:
                cause = f"no heartbeat for {self._dead_after:g} s"
            elif now - beat.progressed > beat.patience + starved:
                cause = f"no progress for {beat.patience:g} s in {beat.last.doing}"
            else:
                continue
            lost.setdefault(worker, f"tensor rank {rank}: {cause}" if rank else cause)
        return lost

    def _common_silence(self, silences: Sequence[float]) -> float:
        """Seconds that the median process is overdue, up to `dead_after`: half of them then wait for a core."""
        if len(silences) < 2:
            return 0.0
        return min(max(0.0, median_low(silences) - self._limits.heartbeat), self._limits.dead_after)

    def patience(self, longest: float | None) -> float:
        """Seconds that an operation may take before it counts as hung.

        Args:
            longest: seconds that such a one has taken lately, None when it is the process's first.
        """
        limits = self._limits
        if longest is None:
            return max(limits.hung_after, limits.warm_up, limits.hung_factor * self._profiled)
        return max(limits.hung_after, limits.hung_factor * longest)

    def patience_with(self, worker: Worker) -> float:
        """Seconds that the worker's operation may take, by its last heartbeat."""
        beats = [beat for name in self._names[worker] if (beat := self._beats.get(name)) is not None]
        return max((beat.patience for beat in beats), default=self._limits.warm_up)

    def forget(self, worker: Worker) -> None:
        """The worker's next heartbeats come from other processes."""
        for name in self._names[worker]:
            self._beats.pop(name, None)

    def is_silent(self, worker: Worker, now: float) -> bool:
        """Whether a heartbeat is well overdue, though not long enough to be dead."""
        beats = [beat for name in self._names[worker] if (beat := self._beats.get(name)) is not None]
        return any(now - beat.changed > self._limits.dead_after / 2 for beat in beats)


def profiled_seconds(job: PricedJob) -> float:
    """The longest instruction by the job's profile; 0 when `[times]` is not in seconds."""
    scale = job.seconds_per_unit
    if scale is None:
        return 0.0
    profile, stages = job.prices, job.shape.stages
    names = ("backward_input", "backward_weight")
    backward = map(sum, zip(*(profile.per_stage(name, stages) for name in names), strict=True))
    return scale * max(*profile.per_stage("forward", stages), *backward, *profile.per_stage("step", stages))


def whom_to_fence(pair: Sequence[Worker], live: Collection[Worker], silent: Collection[Worker] = ()) -> Worker | None:
    """Which of two workers that cannot reach each other to fence, so that the other can go on.

    A worker that is silent, if any; else one that joins and has no state yet; else the one whose stage has more live
    hosts, because its loss costs less; of equals the later position. Never a stage's last host: None when both are.

    Args:
        live: the workers that hold their stage's state.
    """
    hosts = {worker: sum(peer.rank == worker.rank for peer in live) for worker in pair}
    candidates = [worker for worker in pair if worker not in live or hosts[worker] > 1]
    return max(candidates, key=lambda w: (w in silent, w not in live, hosts[w], w), default=None)
