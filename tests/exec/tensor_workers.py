"""The processes of one worker with tensor parallelism, without schedules: stages, a tensor group and gloo between them.

Started once per module; each case names a job and the programs to run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.model.state.optimizer import HALVES
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.protocol import Report
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.plugin import TransportSettings
from recycle.exec.worker.iterations import report_of
from recycle.job import Job
from recycle.job.shape import Worker
from tests.exec.drive import build_stage, execute, gradients_by_name, micro_batches, one_f_one_b, split
from tests.warm import end_processes, warm_context

ANSWER_SECONDS = 240.0


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
    digests: list[str]


class TensorWorkers:
    """T processes; use as a context manager."""

    def __init__(self, count: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        warm = warm_context()
        self._members = []
        for rank in range(count):
            ours, theirs = warm.Pipe()
            process = warm.Process(target=_serve, args=(self._store.port, rank, count, theirs), daemon=True)
            process.start()
            self._members.append((process, ours))

    def iterate(self, job: Job, weights_last: bool = False) -> list[Part]:
        """Run one iteration of every stage of `job` and step; `weights_last` splits B and puts every W to the end."""
        for _, pipe in self._members:
            pipe.send((job.to_toml(), weights_last))
        parts = []
        for rank, (_, pipe) in enumerate(self._members):
            assert pipe.poll(ANSWER_SECONDS), f"tensor rank {rank} hangs"
            part = pipe.recv()
            assert isinstance(part, Part), part
            parts.append(part)
        return parts

    def __enter__(self) -> TensorWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        end_processes(self._members)


def whole_gradients(parts: list[Part]) -> dict[str, torch.Tensor]:
    """The gradients of the whole model, put together from those of all tensor ranks."""
    found = {}
    for name in {name: None for part in parts for name in part.gradients}:
        holders = [part for part in parts if name in part.gradients]
        pieces, dimension = [part.gradients[name] for part in holders], holders[0].cuts.get(name)
        found[name] = torch.from_numpy(pieces[0] if dimension is None else np.concatenate(pieces, dimension))
    return found


def in_halves(gradients: dict[str, torch.Tensor], stages: list[MegatronStage]) -> dict[str, torch.Tensor]:
    """The gradients, those of gated layers as the two that tensor ranks cut each by itself."""
    halved = {name for stage in stages for name in stage._names.halved}
    found = {}
    for name, gradient in gradients.items():
        both = zip(HALVES, gradient.chunk(2, 0), strict=True) if name in halved else [("", gradient)]
        found |= {f"{name}{half}": part for half, part in both}
    return found


def _serve(port: int, rank: int, count: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    store, me = TCPStore("127.0.0.1", port, is_master=False), Worker(0, 0)
    plugin = Gloo(TransportSettings(store, tensor=(rank, count)))
    transport = plugin.open(GroupsOfGeneration("tensor", me, [me], {}, ((1,), torch.float32)))
    group = TensorGroup(rank, count)
    group.exchange = transport.exchange
    while (case := pipe.recv()) is not None:
        try:
            answer: Any = _iterate(group, *case)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)
    os._exit(0)


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
    return Part(gradients, cuts, report, [stage.state_digest() for stage in stages])
