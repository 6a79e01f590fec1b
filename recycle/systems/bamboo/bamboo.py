"""Bamboo as a system: take over at a failure, rearrange at a step boundary, restart after the loss of two neighbors.

Source: Thorpe et al., NSDI 2023, and uclasystem/bamboo @ 8080929; constants from its simulator. Redundancy level 1:
every worker holds parameters and optimizer state of its stage and the next, and also runs the next stage's forwards
("eager"). floor(n / depth) pipelines of the preferred depth run, or deeper ones if memory requires it.

    a worker dies      its predecessor runs both stages; the iteration continues. Pause: detection, new groups, and (as
                       `copy`) the stash from the host and the lost backward of each micro-batch in flight
    a neighbor dies    fatal, like the death of a worker with two stages: restart from the last checkpoint
    step boundary      rearranged if as many workers wait as are overloaded, if 2 * overloaded / active > 5 %, or if one
                       more pipeline is possible. Pause: a rendezvous (as `plan`) and missing state

Every worker has room for two stages' state and activations, M buffers per stage (GPipe's memory). Redundant forwards
store their results on the host. Optimizer state is never sharded: a take-over needs all of a stage's state at once.

Limits: no rearrangement within an iteration; a fatal death restarts all pipelines. The last stage's copy of the first
stage has no redundant forwards. Redundant forwards cost up to F / c of the iteration even without failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from recycle.job.profile import Profile
from recycle.systems.bamboo.pipelines import Pipeline, StageRanks, arrange, copies, healthy_hosts, iteration_schedule
from recycle.systems.grids import CheckpointedSystem
from recycle.systems.joint_iteration import WorkerTimes, even_shares, iteration_seconds, worker_times
from recycle.systems.scenario import Scenario
from recycle.systems.system import ActiveConfiguration, Change, DoesNotFit, Nodes, State, Stopped

OVERLOADED_SHARE = 0.05
"""Threshold of 2 * overloaded / active above which Bamboo rearranges its pipelines."""
RENDEZVOUS = 20.0
"""Seconds of a local rendezvous, 5 to 20 in Bamboo's simulator; Oobleck's evaluation measured 76 to 450."""
PCIE = 25e9
"""Bytes per second between device and host."""
BURST, BURST_PAIRS = 0.05, 6
"""Share of failures that take several nodes, and the pairs among them (of four).

Each pair may be neighbors. Together with successive deaths of neighbors, this sets only the checkpoint interval.
"""


@dataclass(frozen=True, kw_only=True)
class BambooConfiguration(ActiveConfiguration):
    """Pipelines of one depth; live slots outside them wait."""

    pipelines: tuple[Pipeline, ...]


class Bamboo(CheckpointedSystem[BambooConfiguration]):
    """Implements `recycle.systems.system.System`.

    Args:
        buffer_per_micro_batch: M activation buffers, as in Bamboo; otherwise 1F1B's number.
    """

    name = "bamboo"
    pcie = PCIE

    def __init__(self, scenario: Scenario, *, buffer_per_micro_batch: bool = True) -> None:
        super().__init__(scenario)
        self.buffer_per_micro_batch = buffer_per_micro_batch
        self._computed = cache(self._simulated)
        self._period = cache(self._synchronised)
        self._profile = cache(self._priced)
        self.depth, self._misfit = self._fitting()

    # ---- the protocol

    def begin(self, live: Nodes) -> State | DoesNotFit:
        return self._misfit or self._arranged(live, ())

    def survive(self, state: BambooConfiguration, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        slots = frozenset(self.scenario.slots(live))
        survivors = [pipeline.without(set(pipeline.live) - slots) for pipeline in state.pipelines]
        if None in survivors:
            return self.restart(live, failed, "fatal")
        pipelines = tuple(pipeline for pipeline in survivors if pipeline)
        new = self._configuration(live, pipelines)
        if pipelines != state.pipelines:
            pause = self.scenario.pause()
            pause = replace(pause, copy=pause.copy + self._catch_up(state.pipelines, pipelines))
            return Change(state=new, pause=pause, event="take over")
        if new.reconsider and not failed:
            return self._rearranged(new)
        return Change(state=new, event="wait")

    # ---- configurations

    def _fitting(self) -> tuple[int, DoesNotFit | None]:
        slots, layers = len(self.scenario.node_of), len(self.scenario.layers)
        preferred = min(self.scenario.shape.ranks, layers)
        misfits = {}
        for depth in range(preferred, max(preferred, min(layers, slots)) + 1):
            misfit = self._does_not_fit(depth, max(1, min(slots // depth, self.scenario.micro_batches)))
            if misfit is None:
                return depth, None
            misfits[depth] = misfit
        return min(misfits.items(), key=lambda item: item[1].needed / item[1].cap)

    def _priced(self, depth: int, pipelines: int) -> Profile:
        profile = self.scenario.profile(self.scenario.cut(depth), 2 * pipelines if depth > 1 else pipelines)
        forward, activation, weight, inputs = (
            profile.per_stage(name, depth) for name in ("forward", "activation", "backward_weight", "backward_input")
        )
        seen = []
        for s in range(depth):
            overlapped_seconds = forward[s] + forward[s - 1] + inputs[s - 1] + weight[s - 1]
            seen.append(forward[s] + max(0.0, activation[s] / self.pcie - overlapped_seconds))
        return replace(profile, redundant_forward=seen, redundant_stash=0.0)

    def _does_not_fit(self, depth: int, pipelines: int) -> DoesNotFit | None:
        profile = self._profile(depth, pipelines)
        activation = profile.per_stage("activation", depth)
        most = ceil(self.scenario.micro_batches / pipelines)
        held = [most if self.buffer_per_micro_batch else min(depth - s, most) for s in range(depth)]
        hosted = [copies(stage, depth) for stage in range(depth)]
        needed = [profile.fixed_bytes(own, depth) + sum(held[s] * activation[s] for s in own) for own in hosted]
        worker = self.scenario.fullest(needed)
        if worker.fits:
            return None
        stage, after = worker.rank, (worker.rank + 1) % depth
        return worker.does_not_fit(
            f"{pipelines} pipeline(s) of {depth} stages: the worker of stage {stage}, with stage {after} taken over,"
            f" holds two stages' state and activations of {held[stage]} and {held[after]} micro-batches"
        )

    def _simulated(self, hosts: StageRanks, micro_batches: int) -> list[WorkerTimes]:
        return worker_times(iteration_schedule([hosts], [micro_batches]), self._profile(len(hosts), 1))

    def _synchronised(self, pipelines: tuple[tuple[StageRanks, int], ...]) -> float:
        depth = len(pipelines[0][0])
        workers = [worker for hosts, share in pipelines for worker in self._computed(hosts, share)]
        return iteration_seconds(workers, self._profile(depth, len(pipelines)), [1.0] * depth)

    def _configuration(self, live: Nodes, pipelines: tuple[Pipeline, ...]) -> BambooConfiguration:
        shares = even_shares(self.scenario.micro_batches, len(pipelines))
        hosts = [pipeline.hosts for pipeline in pipelines]
        period = self._period(tuple(sorted(zip(hosts, shares, strict=True))))
        waiting = len(self.scenario.slots(live)) - sum(len(pipeline.live) for pipeline in pipelines)
        return BambooConfiguration(
            live=live,
            period=period,
            samples=self.scenario.samples,
            idle=waiting,
            checkpoints=self.scenario.checkpoints(self.scenario.nodes, self._fatal_share(len(pipelines))),
            reconsider=self._should_rearrange(pipelines, waiting),
            layout=f"{len(pipelines)} x {self.depth}",
            schedules=lambda: [(iteration_schedule(hosts, shares), self._profile(self.depth, len(hosts)))],
            pipelines=pipelines,
        )

    def _fatal_share(self, pipelines: int) -> float:
        scenario = self.scenario
        shares = even_shares(scenario.micro_batches, pipelines)
        period = self._period(tuple((healthy_hosts(self.depth), share) for share in shares))
        exposed = period + scenario.pause().seconds + RENDEZVOUS
        burst = BURST * min(1.0, BURST_PAIRS * 2 / scenario.nodes)
        return burst + 3 * scenario.failure_rate * exposed

    # ---- changes

    def _count(self, slots: int) -> int:
        return min(slots // self.depth, self.scenario.micro_batches)

    def _should_rearrange(self, pipelines: Sequence[Pipeline], waiting: int) -> bool:
        overloaded = sum(pipeline.overloaded for pipeline in pipelines)
        active = sum(len(pipeline.live) for pipeline in pipelines)
        possible = self._count(active + waiting)
        if not possible or self._does_not_fit(self.depth, possible) is not None:
            return False
        return waiting >= overloaded > 0 or 2 * overloaded / active > OVERLOADED_SHARE or possible > len(pipelines)

    def _arranged(self, live: Nodes, before: Sequence[Pipeline]) -> State:
        slots = self.scenario.slots(live)
        count = self._count(len(slots))
        if not count:
            return Stopped(live=live, reason=f"{len(slots)} worker(s), a pipeline needs {self.depth}")
        short = self._does_not_fit(self.depth, count)
        if short is not None:
            return short.stopped(live)
        return self._configuration(live, tuple(arrange(slots, self.scenario.node_of, self.depth, count, before)))

    def _rearranged(self, state: BambooConfiguration) -> Change:
        new = self._arranged(state.live, state.pipelines)
        assert isinstance(new, BambooConfiguration)
        held: dict[int, set[int]] = {}
        for pipeline in state.pipelines:
            held |= pipeline.holds()
        size = self.scenario.state_per_stage(self.scenario.cut(self.depth))
        missing = [
            sum(size[stage] for stage in stages - held.get(slot, set()))
            for pipeline in new.pipelines
            for slot, stages in pipeline.holds().items()
        ]
        pause = self.scenario.pause(max(missing), detected=False, plan=self.scenario.pauses.plan + RENDEZVOUS)
        return Change(state=new, pause=pause, bytes=sum(missing), event="rearrange")

    def _catch_up(self, before: Sequence[Pipeline], after: Sequence[Pipeline]) -> float:
        depth, most = self.depth, ceil(self.scenario.micro_batches / len(before))
        profile = self._profile(depth, len(before))
        forward, activation, inputs, weight = (
            profile.per_stage(name, depth) for name in ("forward", "activation", "backward_input", "backward_weight")
        )
        restored = [forward[0], *(each / self.pcie for each in activation[1:])]  # the first stage has no stash
        seconds = [min(most, depth - s) * (inputs[s] + weight[s] + restored[s]) for s in range(depth)]
        hosts = [(old.hosts, new.hosts) for old, new in zip(before, after, strict=True)]
        return max(sum(seconds[s] for s in range(depth) if old[s] != new[s]) for old, new in hosts)
