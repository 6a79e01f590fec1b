"""The processes of one worker with tensor parallelism, without schedules: stages, a tensor group and gloo between them.

Started once per module; each case names a job and the programs to run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from recycle import Job, Worker
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.model.state.optimizer import HALVES
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.protocol import Report
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.plugin import TransportSettings
from recycle.exec.worker.iterations import report_of
from tests.exec.drive import build_stage, execute, gradients_by_name, micro_batches, one_f_one_b, split
from tests.warm import WarmPool


@dataclass(frozen=True)
class Part:
    """What one tensor rank has of all stages after an iteration.

    Attributes:
        gradients: mean gradients by name in the whole model.
        cuts: name -> dimension along which it is cut; None for what this tensor rank alone has, whole.
        report: as for a commit.
        digests: of the states after a step with these gradients.
    """

    gradients: dict[str, np.ndarray]
    cuts: dict[str, int | None]
    report: Report
    digests: list[dict[int, str]]


class TensorWorkers(WarmPool):
    """T processes."""

    def __init__(self, count: int):
        super().__init__(count, _make_worker, count)
        self._count = count

    def iterate(self, job: Job, weights_last=False) -> list[Part]:
        """Run one iteration of every stage of `job` and step; `weights_last` splits B and puts every W to the end."""
        return self.ask(self._count, job.to_toml(), weights_last)


def whole_gradients(parts: list[Part]) -> dict[str, torch.Tensor]:
    """The gradients of the whole model, joined from all tensor ranks."""
    result = {}
    for name in {name: None for part in parts for name in part.gradients}:
        holders = [part for part in parts if name in part.gradients]
        pieces, dimension = [part.gradients[name] for part in holders], holders[0].cuts.get(name)
        result[name] = torch.from_numpy(pieces[0] if dimension is None else np.concatenate(pieces, dimension))
    return result


def in_halves(gradients: dict[str, torch.Tensor], stages: list[MegatronStage]) -> dict[str, torch.Tensor]:
    """The gradients; gated layers as the two parts that tensor ranks split separately."""
    halved = {name for stage in stages for name in stage._names.halved}
    result = {}
    for name, gradient in gradients.items():
        both = zip(HALVES, gradient.chunk(2, 0), strict=True) if name in halved else [("", gradient)]
        result |= {f"{name}{half}": part for half, part in both}
    return result


def _make_worker(store, rank: int, count: int) -> Callable[[str, bool], Part]:
    worker = Worker(0, 0)
    plugin = Gloo(TransportSettings(store, tensor=(rank, count)))
    transport = plugin.open(GroupsOfGeneration("tensor", worker, [worker], {}, ((1,), torch.float32)))
    group = TensorGroup(rank, count)
    group.exchange = transport.exchange
    return partial(_iterate, group)


def _iterate(group: TensorGroup, text: str, weights_last: bool) -> Part:
    job = Job.from_toml(text)
    count = job.shape.stages
    stages = [build_stage(job, index, group) for index in range(count)]
    batches = micro_batches(0, job.shape.micro_batches)
    for stage in stages:
        stage.begin_iteration(0)
    programs = [one_f_one_b(index, count, batches) for index in range(count)]
    execute(zip(stages, [split(p, batches) for p in programs] if weights_last else programs, strict=True))
    if len(stages) > 1 and stages[0].tied_buffers():
        (first,), (last,) = stages[0].tied_buffers(), stages[-1].tied_buffers()
        first += last
        last.copy_(first)
    report = report_of({stage.index: stage for stage in stages})
    gradients = {name: tensor.numpy().copy() for name, tensor in in_halves(gradients_by_name(stages), stages).items()}
    for stage in stages:
        stage.step(0, 1.0)
    cuts = {name: cut for stage in stages for name, cut in stage.cuts().items() if name in gradients}
    return Part(gradients, cuts, report, [stage.digests() for stage in stages])
