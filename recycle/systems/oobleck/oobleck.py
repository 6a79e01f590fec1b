"""Oobleck as a system: pipelines from templates, reconfigured after a failure.

Source: Jang et al., SOSP 2023, and SymbioticLab/Oobleck @ 7966556. With f tolerated failures, and n0 the fewest nodes
whose template fits into memory, there are templates for n0 .. N - f n0 nodes. n nodes form the multiset of at least f +
1 templates with the shortest iteration, without idle nodes.

    nodes die     smaller templates, else borrowed nodes, else merged pipelines; the iteration is repeated. Pause: the
                  common one, and copies of missing layers
    nodes join    all pipelines are instantiated again at the next boundary (unlike the artifact, in Oobleck's favor)
    below (f + 1) n0 nodes, or a layer without a replica: stop, or restart from a checkpoint

Limits: a stage is on one worker, whereas Oobleck can spread it over a node. Nodes with an unusual number of workers are
unused. With different cuts the optimizer state cannot be sharded, so every host has all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from recycle.ir.families import one_f_one_b
from recycle.job.layers import ring_seconds, stage_sums
from recycle.job.shape import Shape
from recycle.systems.grids import CheckpointedSystem
from recycle.systems.joint_iteration import hosted_stages, iteration_seconds, worker_times
from recycle.systems.oobleck.pipelines import (
    PipelineNodes,
    assign_nodes,
    common_cut,
    copy_bytes,
    iteration_schedule,
    layers_per_node,
    reconfigure,
)
from recycle.systems.oobleck.template import PipelineTemplate, distribute, instantiate, templates
from recycle.systems.scenario import FullestWorker, LayerRange, Scenario
from recycle.systems.system import ActiveConfiguration, Change, DoesNotFit, Loss, Nodes, State, Stopped, TimedSchedule


@dataclass(frozen=True, kw_only=True)
class OobleckConfiguration(ActiveConfiguration):
    """Nodes of each pipeline, in the order of its stages, and micro-batches of each pipeline."""

    pipelines: tuple[PipelineNodes, ...]
    shares: tuple[int, ...]


class Oobleck(CheckpointedSystem[OobleckConfiguration]):
    name = "oobleck"
    failures = 1
    """f, the number of simultaneous failures to tolerate."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._computed = cache(self._simulated)
        self._period = cache(self._synchronised)
        self._sizes = cache(self._sizes_of)

    # ---- the protocol

    def begin(self, live: Nodes) -> State | DoesNotFit:
        """Put all live nodes into new pipelines; no node holds state yet."""
        if self._does_not_fit:
            return self._does_not_fit
        reason = self._too_few(live)
        if reason is not None:
            return Stopped(live=live, reason=reason)
        return self._configuration(live, self._assigned(live, {}, []))

    def survive(self, state: OobleckConfiguration, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        held = {node: layers for node, layers in self._held(state.pipelines).items() if node in live}
        if len(held) == sum(map(len, state.pipelines)):
            if not joined:
                state = replace(state, live=live, idle=self._idle(live, state.pipelines))
                return Change(state=state, event="wait")
            return self._changed(state, live, self._assigned(live, held, state.pipelines), held, Loss.NOTHING, "join")
        kept = {layer for first, last in held.values() for layer in range(first, last)}
        if self._too_few(live) or len(kept) < len(self.scenario.layers):
            return None
        reconfigured = reconfigure(state.pipelines, failed, self.templates)
        if reconfigured is None:
            intact = [members for members in state.pipelines if not failed.intersection(members)]
            assigned = self._assigned(live, held, intact)
            return self._changed(state, live, assigned, held, Loss.ITERATION, "re-instantiate")
        new_pipelines, event = reconfigured
        before = set(state.pipelines)
        pipelines = [
            members
            if members in before
            else tuple(assign_nodes(self._node_layers(len(members)), members, held, self._weights))
            for members in new_pipelines
        ]
        return self._changed(state, live, pipelines, held, Loss.ITERATION, event)

    # ---- configurations

    @cached_property
    def templates(self) -> dict[int, PipelineTemplate]:
        fitting = self._fitting
        if not fitting:
            return {}
        most = self.scenario.nodes - self.failures * min(fitting)
        return {nodes: template for nodes, template in fitting.items() if nodes <= most}

    def _schedules(self, sizes: Sequence[int], shares: Sequence[int]) -> list[TimedSchedule]:
        schedule, common = iteration_schedule([self.templates[size].split for size in sizes], shares)
        return [(schedule, self.scenario.profile(common, len(sizes)))]

    @cached_property
    def _workers_on(self) -> Counter[int]:
        return Counter(self.scenario.node_of)

    @cached_property
    def workers_per_node(self) -> int:
        return max(Counter(self._workers_on.values()).items(), key=lambda item: (item[1], item[0]))[0]

    @cached_property
    def _fitting(self) -> dict[int, PipelineTemplate]:
        layers, per_node = self.scenario.layers, self.workers_per_node
        most = min(len(layers), self.scenario.nodes * per_node)
        all_templates = templates([layer.seconds for layer in layers], most)
        by_nodes = {
            template.stages // per_node: template for template in all_templates if template.stages % per_node == 0
        }
        return {
            nodes: template
            for nodes, template in by_nodes.items()
            if template.stages >= self.scenario.least_ranks and self._fullest(template).fits
        }

    def _fullest(self, template: PipelineTemplate) -> FullestWorker:
        return self.scenario.fullest_of_1f1b(template.split, self.scenario.micro_batches)

    @cached_property
    def _does_not_fit(self) -> DoesNotFit | None:
        nodes = self.scenario.nodes
        if self._fitting and (self.failures + 1) * min(self._fitting) <= nodes:
            return None
        layers = [layer.seconds for layer in self.scenario.layers]
        most = min(len(layers), max(1, nodes // (self.failures + 1)) * self.workers_per_node)
        leanest = min(templates(layers, most), key=self._fullest)
        worker = self._fullest(leanest)
        if worker.fits:
            return None
        return worker.does_not_fit(
            f"{self.failures + 1} pipelines on {nodes} nodes have at most {most} stages each, of which stage"
            f" {worker.rank} of {leanest.stages} holds {worker.needed:.6g} bytes"
        )

    def _simulated(self, size: int, share: int) -> list[float]:
        split = self.templates[size].split
        profile = replace(self.scenario.profile(split, 1), reduce=0.0, step=0.0)
        return [end for end, _ in worker_times(one_f_one_b(Shape(1, len(split), share)), profile)]

    def _synchronised(self, pipelines: tuple[tuple[int, int], ...]) -> float:
        splits = [self.templates[size].split for size, _ in pipelines]
        common, _ = common_cut(splits)
        workers = [
            worker
            for split, (size, share) in zip(splits, pipelines, strict=True)
            for worker in zip(self._computed(size, share), hosted_stages(split, common), strict=True)
        ]
        return iteration_seconds(workers, self.scenario.profile(common, len(pipelines)), common)

    def _configuration(self, live: Nodes, pipelines: Sequence[PipelineNodes]) -> OobleckConfiguration:
        scenario = self.scenario
        sizes = [len(members) for members in pipelines]
        depths = Counter(sizes)
        shares = distribute([self.templates[size].per_micro_batch for size in sizes], scenario.micro_batches)
        return OobleckConfiguration(
            live=live,
            period=self._period(tuple(sorted(zip(sizes, shares, strict=True)))),
            samples=scenario.samples,
            idle=self._idle(live, pipelines),
            checkpoints=scenario.checkpoints(scenario.nodes),
            pipelines=tuple(pipelines),
            shares=tuple(shares),
            layout=" + ".join(f"{depths[depth]} x {depth}" for depth in sorted(depths)),
            schedules=partial(self._schedules, sizes, shares),
        )

    # ---- changes

    def _usable(self, live: Collection[int]) -> list[int]:
        return sorted(node for node in live if self._workers_on[node] == self.workers_per_node)

    def _idle(self, live: Nodes, pipelines: Sequence[PipelineNodes]) -> int:
        return len(self.scenario.slots(live)) - sum(map(len, pipelines)) * self.workers_per_node

    def _too_few(self, live: Nodes) -> str | None:
        pipelines, nodes = self.failures + 1, len(self._usable(live))
        if not self._fitting:
            return (
                f"no pipeline of whole nodes, of {self.workers_per_node} worker(s) each, has as many stages as it needs"
            )
        if self.scenario.micro_batches < pipelines:
            return f"{pipelines} pipelines need a micro-batch each, the batch has {self.scenario.micro_batches}"
        least = pipelines * min(self._fitting)
        return f"{nodes} node(s), {pipelines} pipelines need {least}" if nodes < least else None

    def _sizes_of(self, nodes: int) -> tuple[int, ...]:
        weights = {size: template.per_micro_batch for size, template in self.templates.items()}
        for count in range(nodes, 0, -1):
            sizes = instantiate(weights, count, self.failures + 1, self.scenario.micro_batches, self._sync)
            if sizes is not None:
                return tuple(sizes)
        raise ValueError(f"{nodes} node(s) are too few for {self.failures + 1} pipelines")

    def _sync(self, sizes: Sequence[int]) -> float:
        return ring_seconds(max(self._gradients[size] for size in set(sizes)), len(sizes), self.scenario.bandwidth)

    @cached_property
    def _gradients(self) -> dict[int, float]:
        stages = self.scenario.stages
        return {size: max(stage_sums(stages(template.split), "gradients")) for size, template in self.templates.items()}

    def _node_layers(self, size: int) -> list[LayerRange]:
        return layers_per_node(self.templates[size].split, self.workers_per_node)

    def _held(self, pipelines: Sequence[PipelineNodes]) -> dict[int, LayerRange]:
        return {
            node: layers
            for members in pipelines
            for node, layers in zip(members, self._node_layers(len(members)), strict=True)
        }

    @cached_property
    def _weights(self) -> list[float]:
        state = [layer.state for layer in self.scenario.layers]
        return state if any(state) else [1.0] * len(state)

    def _assigned(
        self, live: Nodes, held: Mapping[int, LayerRange], intact: Sequence[PipelineNodes]
    ) -> list[PipelineNodes]:
        usable = self._usable(live)
        sizes = Counter(self._sizes(len(usable)))
        kept = []
        for members in intact:
            if sizes[len(members)]:
                sizes[len(members)] -= 1
                kept.append(members)
        wanted = list(sizes.elements())
        if not wanted:
            return kept
        free = sorted(set(usable).difference(*kept))
        ranges = [place for size in wanted for place in self._node_layers(size)]
        assigned = iter(assign_nodes(ranges, free, held, self._weights))
        return kept + [tuple(next(assigned) for _ in range(size)) for size in wanted]

    def _changed(
        self,
        before: OobleckConfiguration,
        live: Nodes,
        pipelines: Sequence[PipelineNodes],
        held: Mapping[int, LayerRange],
        loss: Loss,
        event: str,
    ) -> Change:
        after = self._configuration(live, pipelines)
        if after.pipelines == before.pipelines:
            return Change(state=after, event="wait")
        splits = [self.templates[len(members)].split for members in pipelines]
        state = [layer.state for layer in self.scenario.layers]
        busiest, total = copy_bytes(splits, pipelines, held, state, self.workers_per_node)
        pause = self.scenario.pause(busiest, detected=loss is Loss.ITERATION)
        return Change(state=after, pause=pause, loss=loss, bytes=total, event=event)
