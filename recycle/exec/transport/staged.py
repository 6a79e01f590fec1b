"""Staged transport: workers compute on a GPU, and gloo moves copies of their tensors in host memory.

Several workers may share a GPU, which NCCL refuses, so all faults can be tried on a single card. Copies wait for the
device, so nothing overlaps: use NCCL for speed. On a CPU the same code copies between buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor

from recycle.exec.ports import refusal_of_gloo
from recycle.exec.transport.base import Exchanging, Shapes
from recycle.exec.transport.gloo import Gloo, GlooTransport
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.job import Job


class Staged(Gloo):
    """Transport between processes of any number per GPU; without the sums of a sharded optimizer."""

    takes_gpus, has_shards = True, False
    environment: ClassVar[Mapping[str, str]] = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic matrix products
    }

    @classmethod
    def refusal(cls, job: Job) -> str | None:
        return refusal_of_gloo(job.membership.ports)

    def _form(self, groups: GroupsOfGeneration) -> GroupTransport:
        return StagedTransport(self.settings, groups)


class StagedTransport(GlooTransport):
    def __init__(self, settings: TransportSettings, groups: GroupsOfGeneration) -> None:
        super().__init__(settings, groups)
        self._device = settings.device
        self._copies: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _start_send(self, peer: Any, tensor: Tensor, tag: int) -> Any:
        sending = super()._start_send(peer, copy := _host_copy(tensor), tag)
        sending.copy = copy  # gloo does not keep it alive
        return sending

    def _start_receive(self, peer: Any, tensor: Tensor, tag: int) -> Any:
        copy = _host_buffer(tensor)
        return _Receive(super()._start_receive(peer, copy, tag), copy, tensor)

    def begin(self, program: Any, iteration: int) -> None:
        self._copies = {}
        super().begin(program, iteration)

    def reduce(self, stage: int, buffers: Sequence[Tensor], bucket: int | None = None) -> None:
        if self._sum_of(stage) is None:
            return
        copies = self._copies.setdefault(stage, [])
        copies += [(buffer, _host_copy(buffer)) for buffer in buffers]
        super().reduce(stage, [copy for _, copy in copies[len(copies) - len(buffers) :]], bucket)
        if bucket is None:
            for buffer, copy in self._copies.pop(stage):
                buffer.copy_(copy)

    def exchange(self, parts: Sequence[Tensor], shapes: Shapes | None = None) -> Exchanging:
        pending = super().exchange([_host_copy(part) for part in parts], shapes)
        return lambda: [part.to(self._device) for part in pending()]

    def close(self) -> None:
        super().close()
        self._copies = {}


class _Receive:
    def __init__(self, work: Any, copy: Tensor, tensor: Tensor) -> None:
        self._work, self._copy, self._tensor = work, copy, tensor

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta) -> None:
        self._work.wait(timeout)
        self._tensor.copy_(self._copy)


def _host_buffer(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def _host_copy(tensor: Tensor) -> Tensor:
    return _host_buffer(tensor).copy_(tensor)
