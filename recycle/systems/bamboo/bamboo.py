"""Bamboo as a system: take over at a failure, arrange anew at a step boundary, restart when two neighbours are gone.

Source: Thorpe et al., NSDI 2023, and uclasystem/bamboo @ 8080929; the constants are those of its simulator. Redundancy
level 1: every worker holds parameters and optimizer state of its own stage and of the next, and runs the next one's
forwards too ("eager"). The depth is the preferred one, and more where memory asks for it; pipelines = floor(n / depth),
the rest waits.

    a worker dies            its predecessor runs both stages, and the iteration goes on. Pause: detection, new groups,
                             the stash from the host, and for each micro-batch in flight the backward that was lost.
                             Booked as `copy`.
    its neighbour dies too   fatal, as is the death of one that runs two stages: from the last checkpoint on
    step boundary            arranged anew if as many wait as are overloaded, if 2 * overloaded / active > 5 %, or if
                             one more pipeline is possible. Pause: a rendezvous (booked as `plan`) and missing state

Every worker has room for two stages' state, optimizer included, and for activations. Bamboo numbers its buffers by
micro-batch, so that there are M of them for each stage whatever the order (GPipe's memory); what 1F1B needs is S - s of
them for stage s. What redundant forwards leave is parked on the host; a worker that has taken over runs both stages on
the device.

Where the job shards its optimizer's state Bamboo does not: who takes over needs all of a stage's at once.

Limits: nobody is arranged in the middle of an iteration; whoever is fatal restarts all pipelines, although others hold
the stage; the last stage's copy of the first stage has no redundant forwards; up to depth - 1 workers wait; redundant
forwards cost up to F / c of the iteration, failures or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil

from recycle.job.profile import Profile
from recycle.systems.bamboo.pipelines import Pipeline, StageRanks, arrange, healthy, iteration
from recycle.systems.grids import CheckpointedSystem
from recycle.systems.joint_iteration import WorkerTimes, computed, even_shares, synchronised
from recycle.systems.setting import Setting
from recycle.systems.system import Change, DoesNotFit, Nodes, Running, State, Stopped, Timed

OVERLOADED_SHARE = 0.05
"""2 * overloaded / active above which Bamboo arranges its pipelines anew."""
RENDEZVOUS = 20.0
"""Seconds of a local rendezvous, 5 to 20 in Bamboo's simulator; Oobleck's evaluation took 76 to 450."""
PCIE = 25e9
"""Bytes per second between device and host."""
BURST, BURST_PAIRS = 0.05, 6
"""Share of failures that take several nodes at once, and the pairs among them (of four). Each pair may be neighbours:
with how often neighbours die one after the other, this sets how often a checkpoint is written, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class BambooRunning(Running):
    """Pipelines of one depth; live slots in none of them wait."""

    pipelines: tuple[Pipeline, ...]


class Bamboo(CheckpointedSystem[BambooRunning]):
    """Implements `recycle.systems.system.System`.

    Args:
        buffer_per_micro_batch: M activation buffers, as Bamboo has; else what 1F1B holds.

    Attributes:
        depth: stages of every pipeline.
        pcie: bytes per second between device and host.
    """

    name = "bamboo"
    pcie = PCIE

    def __init__(self, setting: Setting, *, buffer_per_micro_batch: bool = True) -> None:
        super().__init__(setting)
        self.buffer_per_micro_batch = buffer_per_micro_batch
        self._computed = cache(self._simulated)
        self._period = cache(self._synchronised)
        self._profile = cache(self._priced)
        self.depth, self._misfit = self._fitting()

    # ---- the protocol

    def begin(self, live: Nodes) -> State | DoesNotFit:
        return self._misfit or self._arranged(live, ())

    def survive(self, state: BambooRunning, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        slots = frozenset(self.setting.slots(live))
        survivors = [pipeline.without(set(pipeline.live) - slots) for pipeline in state.pipelines]
        if None in survivors:
            return self.restart(live, failed, "fatal")
        pipelines = tuple(pipeline for pipeline in survivors if pipeline)
        new = self._running(live, pipelines)
        if pipelines != state.pipelines:
            pause = self.setting.pause()
            pause = replace(pause, copy=pause.copy + self._catch_up(state.pipelines, pipelines))
            return Change(state=new, pause=pause, event="take over")
        if new.reconsider and not failed:
            return self._rearranged(new)
        return Change(state=new, event="wait")

    # ---- what runs

    def _schedules(self, hosts: Sequence[StageRanks], shares: Sequence[int]) -> list[Timed]:
        """The schedule of pipelines with these hosts and shares, and what prices it."""
        return [(iteration(hosts, shares), self._profile(self.depth, len(hosts)))]

    def _fitting(self) -> tuple[int, DoesNotFit | None]:
        """The depth from the preferred one on that fits with all slots; else the leanest, and what it needs."""
        slots, layers = len(self.setting.node_of), len(self.setting.layers)
        preferred = min(self.setting.shape.ranks, layers)
        misfits = {}
        for depth in range(preferred, max(preferred, min(layers, slots)) + 1):
            misfit = self._does_not_fit(depth, max(1, min(slots // depth, self.setting.micro_batches)))
            if misfit is None:
                return depth, None
            misfits[depth] = misfit
        return min(misfits.items(), key=lambda item: item[1].needed / item[1].cap)

    def _priced(self, depth: int, pipelines: int) -> Profile:
        """Prices of the stages: every stage is reduced over its workers and their copies."""
        profile = self.setting.profile(self.setting.cut(depth), 2 * pipelines if depth > 1 else pipelines)
        forward, activation, weight, inputs = (
            profile.per_stage(name, depth) for name in ("forward", "activation", "backward_weight", "backward_input")
        )
        seen = []
        for s in range(depth):
            beside = forward[s] + forward[s - 1] + inputs[s - 1] + weight[s - 1]
            seen.append(forward[s] + max(0.0, activation[s] / self.pcie - beside))
        return replace(profile, redundant_forward=seen, redundant_stash=0.0)

    def _does_not_fit(self, depth: int, pipelines: int) -> DoesNotFit | None:
        """The fullest worker of so many pipelines, unless all fit: healthy, and once any has taken over."""
        profile = self._profile(depth, pipelines)
        activation = profile.per_stage("activation", depth)
        most = ceil(self.setting.micro_batches / pipelines)
        held = [most if self.buffer_per_micro_batch else min(depth - s, most) for s in range(depth)]
        needed = []
        for stage in range(depth):
            hosted = {stage, (stage + 1) % depth}
            needed.append(profile.fixed_bytes(hosted, depth) + sum(held[s] * activation[s] for s in hosted))
        worker = self.setting.fullest(needed)
        if worker.fits:
            return None
        stage, after = worker.rank, (worker.rank + 1) % depth
        return worker.misfit(
            f"{pipelines} pipeline(s) of {depth} stages: the worker of stage {stage}, with stage {after} taken over,"
            f" holds two stages' state and activations of {held[stage]} and {held[after]} micro-batches"
        )

    def _simulated(self, hosts: StageRanks, micro_batches: int) -> list[WorkerTimes]:
        return computed(iteration([hosts], [micro_batches]), self._profile(len(hosts), 1))

    def _synchronised(self, pipelines: tuple[tuple[StageRanks, int], ...]) -> float:
        """Seconds per iteration of pipelines of (hosts, micro-batches)."""
        depth = len(pipelines[0][0])
        workers = [worker for hosts, share in pipelines for worker in self._computed(hosts, share)]
        return synchronised(workers, self._profile(depth, len(pipelines)), [1.0] * depth)

    def _running(self, live: Nodes, pipelines: tuple[Pipeline, ...]) -> BambooRunning:
        shares = even_shares(self.setting.micro_batches, len(pipelines))
        hosts = [pipeline.hosts for pipeline in pipelines]
        period = self._period(tuple(sorted(zip(hosts, shares, strict=True))))
        waiting = len(self.setting.slots(live)) - sum(len(pipeline.live) for pipeline in pipelines)
        return BambooRunning(
            live=live,
            period=period,
            samples=self.setting.samples,
            idle=waiting,
            checkpoints=self.setting.checkpoints(self.setting.nodes, self._fatal_share(len(pipelines))),
            reconsider=self._should_rearrange(pipelines, waiting),
            layout=f"{len(pipelines)} x {self.depth}",
            schedules=partial(self._schedules, hosts, shares),
            pipelines=pipelines,
        )

    def _fatal_share(self, pipelines: int) -> float:
        """Share of failures that are fatal: bursts with neighbours, and second ones before pipelines are re-made."""
        setting = self.setting
        shares = even_shares(setting.micro_batches, pipelines)
        period = self._period(tuple((healthy(self.depth), share) for share in shares))
        exposed = period + setting.pause().seconds + RENDEZVOUS
        burst = BURST * min(1.0, BURST_PAIRS * 2 / setting.nodes)
        return burst + 3 * setting.failure_rate * exposed

    # ---- changes

    def _count(self, slots: int) -> int:
        return min(slots // self.depth, self.setting.micro_batches)

    def _should_rearrange(self, pipelines: Sequence[Pipeline], waiting: int) -> bool:
        overloaded = sum(pipeline.overloaded for pipeline in pipelines)
        active = sum(len(pipeline.live) for pipeline in pipelines)
        possible = self._count(active + waiting)
        if not possible or self._does_not_fit(self.depth, possible) is not None:
            return False
        return waiting >= overloaded > 0 or 2 * overloaded / active > OVERLOADED_SHARE or possible > len(pipelines)

    def _arranged(self, live: Nodes, before: Sequence[Pipeline]) -> State:
        """Healthy pipelines of all live slots."""
        slots = self.setting.slots(live)
        count = self._count(len(slots))
        if not count:
            return Stopped(live=live, reason=f"{len(slots)} worker(s), a pipeline needs {self.depth}")
        short = self._does_not_fit(self.depth, count)
        if short is not None:
            return short.stopped(live)
        return self._running(live, tuple(arrange(slots, self.setting.node_of, self.depth, count, before)))

    def _rearranged(self, state: BambooRunning) -> Change:
        """At a step boundary: healthy pipelines again, each worker with the state of its two stages."""
        new = self._arranged(state.live, state.pipelines)
        assert isinstance(new, BambooRunning)
        held: dict[int, set[int]] = {}
        for pipeline in state.pipelines:
            held |= pipeline.holds()
        size = self.setting.state_per_stage(self.setting.cut(self.depth))
        missing = [
            sum(size[stage] for stage in stages - held.get(slot, set()))
            for pipeline in new.pipelines
            for slot, stages in pipeline.holds().items()
        ]
        pause = self.setting.pause(max(missing), detected=False, plan=self.setting.pauses.plan + RENDEZVOUS)
        return Change(state=new, pause=pause, bytes=sum(missing), event="rearrange")

    def _catch_up(self, before: Sequence[Pipeline], after: Sequence[Pipeline]) -> float:
        """Seconds until the survivors have what the dead had: of each micro-batch in flight at a lost stage its stash
        from the host and its backward, or its forward and backward where there is no stash. The pipelines catch up
        side by side."""
        depth, most = self.depth, ceil(self.setting.micro_batches / len(before))
        profile = self._profile(depth, len(before))
        forward, activation, inputs, weight = (
            profile.per_stage(name, depth) for name in ("forward", "activation", "backward_input", "backward_weight")
        )
        longest = 0.0
        for old, new in zip(before, after, strict=True):
            seconds = 0.0
            for stage in range(depth):
                if old.hosts[stage] != new.hosts[stage]:
                    has_stash = stage > 0
                    again = inputs[stage] + weight[stage] + (0.0 if has_stash else forward[stage])
                    swap_in = activation[stage] / self.pcie if has_stash else 0.0
                    seconds += min(most, depth - stage) * (again + swap_in)
            longest = max(longest, seconds)
        return longest
