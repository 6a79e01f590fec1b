"""Comparison of states between the hosts of a stage, by checksums in the workers' reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from recycle.exec.hooks.hook import Generation, IterationHook
from recycle.exec.leader.commit import Comparison, comparison
from recycle.exec.model.integrity import layout_of
from recycle.exec.model.stage import Stage
from recycle.exec.protocol import Report, StateTensors
from recycle.exec.worker.step_state import StepState
from recycle.ir.instruction import Instruction
from recycle.job import Job


class StateComparison(IterationHook):
    """The comparisons of one worker. `send` sends the layout of compared states to the leader, for events."""

    def __init__(
        self,
        job: Job,
        stages: Mapping[int, Stage],
        updates: StepState,
        send: Callable[[StateTensors], object] = lambda message: None,
        tensor_rank: int = 0,
    ) -> None:
        self._job, self._stages, self._updates = job, stages, updates
        self._send, self._tensor_rank = send, tensor_rank
        self._described: set[tuple[int, str]] = set()
        self._comparison: Comparison | None = None

    def begin_generation(self, generation: Generation) -> None:
        self._generation = generation
        for stage in self._stages.values():
            for number, part in stage.compared().items():
                plan = generation.record.holds if part.kind == "stage" else ""  # shards are the same in all plans
                if (number, plan) not in self._described:
                    self._described.add((number, plan))
                    layout = layout_of(part.tensors, part.named(part.tensors))
                    tensors = [(tensor.name, tensor.first, tensor.elements, tensor.size) for tensor in layout]
                    self._send(StateTensors(number, self._tensor_rank, plan, tensors))

    def begin_iteration(self, iteration: int, program: Sequence[Instruction]) -> None:
        record = self._generation.record
        first, verified = record.committed + 1, record.verified
        every, before = self._job.compared_every(record.rounds), None if verified is None else verified.step
        self._iteration, self._comparison = iteration, comparison(iteration, first, every, record.rounds, before)
        if self._comparison is not None and iteration != first:  # the first iteration waits for its starting commit
            self._updates.compare_during_waits(self._comparison)

    def before_step(self) -> None:
        if self._comparison is not None:
            self._updates.compare_state(self._comparison)

    def report(self, report: Report) -> Report:
        if self._comparison is None:
            return report
        if self._iteration > self._generation.record.committed + 1:
            self._generation.committed(self._iteration - 1)  # so an older state is not needed any more
        self._updates.compare_state(self._comparison)
        states = {number: (checksum.words, checksum.places) for number, checksum in self._updates.checksums().items()}
        norms: dict[int, list[float]] = {number: [] for number in states}  # live parameters have none
        return msgspec.structs.replace(report, norms=norms | report.norms, states=states)
