"""DualPipeV: DeepSeek's DualPipe cut in half along its symmetry (phases as in the repository deepseek-ai/DualPipe).

Rank r hosts stages r and 2 P - 1 - r. The steady state are overlapped pairs: F of chunk 0 with B of chunk 1, then the
reverse. The first pair of the last rank is not overlapped, which shortens its bubble.

With FB <= F + B the time of a pair, F = I and W <= F, the bubble of the worst rank is (P - 1)(FB + B - 3 W); no closed
form is known for other times. Peak 2 P + 1 chunks on every rank. Limits: two chunks per rank, m >= 2 P.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from recycle.errors import ScheduleError
from recycle.ir.families.every_pipeline import every_pipeline, vee_stages
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, Forward, Instruction, OverlappedPair
from recycle.ir.schedule import Optimizer, Schedule
from recycle.job.shape import MicroBatch, Shape


def dualpipe_v(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only DualPipeV schedule of `shape`. Raises ScheduleError if chunks is not 2, or m < 2 P."""
    stages = vee_stages(shape, "dualpipe-v")
    if shape.micro_batches < 2 * shape.ranks:
        raise ScheduleError(
            f"dualpipe-v: needs micro_batches of at least 2 * ranks = {2 * shape.ranks}, got {shape.micro_batches}"
        )
    programs = [_program(shape, rank, stages[rank]) for rank in range(shape.ranks)]
    return every_pipeline(shape, programs, optimizer=optimizer, metadata={"family": "dualpipe-v"}, stages=stages)


def _program(shape: Shape, rank: int, stages: tuple[int, int]) -> list[Instruction]:
    micro_batches = [MicroBatch(0, j) for j in range(shape.micro_batches)]
    forwards = [iter([Forward(stage, j) for j in micro_batches]) for stage in stages]
    backwards = [iter([Backward(stage, j) for j in micro_batches]) for stage in stages]
    delayed: deque[BackwardWeight] = deque()
    below = shape.ranks - 1 - rank

    def split(chunk: int) -> BackwardInput:
        whole = next(backwards[chunk])
        delayed.append(BackwardWeight(whole.stage, whole.micro_batch))
        return BackwardInput(whole.stage, whole.micro_batch)

    def pair(chunk: int) -> OverlappedPair:
        return OverlappedPair(next(forwards[chunk]), next(backwards[1 - chunk]))

    def phases() -> Iterator[Instruction]:
        for _ in range(2 * below):
            yield next(forwards[0])
        for _ in range(rank + 1):
            yield next(forwards[0])
            yield next(forwards[1])
        for _ in range(below):
            yield split(1)
            yield delayed.popleft()
            yield next(forwards[1])
        for n in range(shape.micro_batches - shape.ranks - below):
            if n == 0 and below == 0:
                yield next(forwards[0])
                yield next(backwards[1])
            else:
                yield pair(0)
            yield pair(1)
        for _ in range(below):
            yield next(backwards[1])
            yield pair(1)
        for n in range(2 * (rank + 1)):
            chunk = 1 - n % 2
            yield next(backwards[chunk]) if n <= rank else split(chunk)
        for _ in range(below):
            yield delayed.popleft()
            yield split(0)
        yield from delayed

    return list(phases())
