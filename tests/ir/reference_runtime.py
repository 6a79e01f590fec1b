"""A slow runtime for tests: runs the iterations of a schedule instruction by instruction.

Written from the design (asynchronous transfers, one lane per directed pair of workers, collective
reduces, staggered or barrier steps) without the graph that `simulate` times, so that tests can compare the two.
"""

from __future__ import annotations

from recycle import Profile, Schedule, Worker, lower
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
    Transfer,
    WaitSend,
    WaitSendActivation,
)


class Runtime:
    """State between iterations: when each worker and lane is free, and the times that carry over."""

    def __init__(self, schedule: Schedule, profile: Profile) -> None:
        self.schedule, self.profile = lower(schedule), profile
        self.programs = {worker: self.schedule.program(worker) for worker in self.schedule.live}
        self.free = dict.fromkeys(self.programs, 0.0)
        self.lane: dict[tuple[Worker, Worker], float] = {}
        self.crossing: dict[tuple[Worker, Worker, int], float] = {}
        stages = schedule.shape.stages
        self.reduce, self.step = profile.per_stage("reduce", stages), profile.per_stage("step", stages)
        self.stepped: dict[tuple[int, Worker], float] = {}
        self.committed = 0.0
        self.first = True

    def iterate(self) -> float:
        """Run one iteration; the time at which its last instruction or transfer ends."""
        stages = self.schedule.shape.stages
        instructions = [i for program in self.programs.values() for i in program]
        self.made: dict[tuple[str, int, object], tuple[float, Worker]] = {}
        self.arrived: dict[tuple[str, int, object, Worker], float] = {}
        self.left = {s: sum(_ends_gradient(i, s) for i in instructions) for s in range(stages)}
        self.hosts = {s: instructions.count(ReduceGradients(s)) for s in range(stages)}
        self.gradient_end = dict.fromkeys(range(stages), 0.0)
        self.at_reduce: dict[int, dict[Worker, float]] = {s: {} for s in range(stages)}
        self.reduced: dict[tuple[int, Worker], float] = {}
        self.steps: dict[tuple[int, Worker], float] = {}
        place = dict.fromkeys(self.programs, 0)
        moved = True
        while moved:
            moved = False
            for worker, program in self.programs.items():
                while place[worker] < len(program) and self.run(worker, program[place[worker]]):
                    place[worker] += 1
                    moved = True
        assert all(place[worker] == len(program) for worker, program in self.programs.items()), "deadlock"
        self.stepped, self.committed, self.first = self.steps, max(self.reduced.values()), False
        return max([*self.free.values(), *self.lane.values()])

    def run(self, worker: Worker, instruction: Instruction) -> bool:
        """Run one instruction if what it needs has happened."""
        if isinstance(instruction, RecvActivation | RecvGradient):
            return True  # posted ahead
        if isinstance(instruction, OverlappedPair):
            return self.compute(worker, [instruction.forward, instruction.backward])
        stage = instruction.stage  # type: ignore[attr-defined]
        if isinstance(instruction, ReduceGradients):
            self.at_reduce[stage][worker] = self.free[worker]
            if len(self.at_reduce[stage]) < self.hosts[stage] or self.left[stage]:
                return False
            begin = max(*self.at_reduce[stage].values(), self.gradient_end[stage])
            self.free[worker] = self.reduced[stage, worker] = begin + self.reduce[stage]
            return True
        if isinstance(instruction, OptimizerStep):
            if self.schedule.optimizer == "barrier":
                if len(self.reduced) < sum(self.hosts.values()):
                    return False
                begin = max(self.free[worker], *self.reduced.values())
            else:
                begin = max(self.free[worker], self.committed)
            self.free[worker] = self.steps[stage, worker] = begin + self.step[stage]
            return True
        micro_batch = instruction.micro_batch  # type: ignore[attr-defined]
        if isinstance(instruction, Transfer):
            value = ("A" if isinstance(instruction, SendActivation) else "G", stage, micro_batch)
            assert isinstance(instruction, SendActivation | SendGradient)
            pair = (worker, instruction.peer)
            crossing = (*pair, stage if isinstance(instruction, SendActivation) else stage - 1)
            if crossing not in self.crossing:
                shape, (sender, receiver, boundary) = self.schedule.shape, crossing
                ends = ([shape.worker_index(sender)], [shape.worker_index(receiver)])
                (self.crossing[crossing],) = self.profile.transfer_seconds(shape, *ends, [boundary])
            end = max(self.made[value][0], self.lane.get(pair, 0.0)) + self.crossing[crossing]
            self.lane[pair] = self.arrived[(*value, instruction.peer)] = end
            return True
        if isinstance(instruction, WaitSend):
            sent = ("A" if isinstance(instruction, WaitSendActivation) else "G", stage, micro_batch)
            self.free[worker] = max(self.free[worker], *(end for key, end in self.arrived.items() if key[:3] == sent))
            return True
        return self.compute(worker, [instruction])

    def compute(self, worker: Worker, pieces: list[Instruction]) -> bool:
        """Run one compute, or the two of an overlapped pair: they begin when both can and end together."""
        ready = [self.ready(worker, piece) for piece in pieces]
        if any(time is None for time in ready):
            return False
        begin = max(self.free[worker], *(time for time in ready if time is not None))
        cost = sum(self.cost(piece) for piece in pieces)
        if len(pieces) == 2 and self.profile.overlapped_pair is not None:
            together = self.profile.overlapped_pair
            cost = together[pieces[0].stage] if isinstance(together, list) else together  # type: ignore[attr-defined]
        end = self.free[worker] = begin + cost * self.profile.speed_of(worker)
        for piece in pieces:
            stage, micro_batch = piece.stage, piece.micro_batch  # type: ignore[attr-defined]
            kind = "A" if isinstance(piece, Forward) else "W" if isinstance(piece, BackwardWeight) else "G"
            self.made[kind, stage, micro_batch] = (end, worker)
            if isinstance(piece, Backward | BackwardWeight):
                self.left[stage] -= 1
                self.gradient_end[stage] = max(self.gradient_end[stage], end)
        return True

    def cost(self, piece: Instruction) -> float:
        """Seconds of a compute at speed 1."""
        names = {
            Forward: ("forward",),
            Backward: ("backward_input", "backward_weight"),
            BackwardInput: ("backward_input",),
            BackwardWeight: ("backward_weight",),
        }[type(piece)]  # type: ignore[index]
        return sum(self.profile.per_stage(name, self.schedule.shape.stages)[piece.stage] for name in names)  # type: ignore[attr-defined]

    def ready(self, worker: Worker, piece: Instruction) -> float | None:
        """Return when the inputs of a compute from other workers have arrived, None before."""
        stage, micro_batch = piece.stage, piece.micro_batch  # type: ignore[attr-defined]
        if isinstance(piece, Forward):
            carried = 0.0
            if not self.first:
                barrier = self.schedule.optimizer == "barrier"
                carried = max(self.stepped.values()) if barrier else self.stepped[stage, worker]
            arrival = self.value("A", stage - 1, micro_batch, worker) if stage else 0.0
            return None if arrival is None else max(carried, arrival)
        if isinstance(piece, BackwardWeight):
            return self.made["G", stage, micro_batch][0]
        return self.value("G", stage + 1, micro_batch, worker) if stage + 1 < self.schedule.shape.stages else 0.0

    def value(self, kind: str, stage: int, micro_batch: object, worker: Worker) -> float | None:
        """Return when a value arrived on a worker, None before."""
        end, maker = self.made.get((kind, stage, micro_batch), (None, None))
        return end if maker == worker else self.arrived.get((kind, stage, micro_batch, worker))


def _ends_gradient(instruction: Instruction, stage: int) -> bool:
    backward = instruction.backward if isinstance(instruction, OverlappedPair) else instruction
    return isinstance(backward, Backward | BackwardWeight) and backward.stage == stage


def growth(schedule: Schedule, profile: Profile, iterations: int, window: int) -> tuple[float, float]:
    """(end of the first iteration, mean growth per iteration over the last `window` of `iterations`)."""
    runtime = Runtime(schedule, profile)
    ends = [runtime.iterate() for _ in range(iterations)]
    return ends[0], (ends[-1] - ends[-1 - window]) / window
