"""NCCL communicators for transports between GPUs. Run so far by processes of one GPU (docs/measurements/gpu.md).

A dead peer leaves spinning kernels. NCCL may see its closed connections, but no call raises the error, and torch
reports the operations as completed. So heartbeats and process ends detect deaths. The watch thread then aborts all
communicators of this process, which ends the spinning kernels. They are aborted in one group: a single abort waits for
the device, where receives of the others spin (pytorch issue 119797). Communicators are never split from others, because
an abort does not reach split ones. After an abort everything on its stream is invalid, and the iteration restarts from
the committed step. The environment disables torch's watchdog, which would end the process.
`tests/exec/accelerator` runs this code on a simulated NCCL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from recycle.errors import JobError, RunError
from recycle.exec.ports import refusal_of_nccl
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.lanes import LanePlugin, LaneTransport
from recycle.exec.transport.plugin import TransportSettings, computes_on_gpu
from recycle.job import Job
from recycle.megatron_versions import nccl_batch, nccl_group, nccl_has_failed

UNFIT_VERSIONS = ((2, 17, 1), (2, 25, 1))
"""Versions whose abort is reported to hang: pytorch issues 119215 and 149153."""


class Nccl(LanePlugin):
    """Transport between processes with one exclusive GPU each: NCCL refuses two ranks on one.

    Raises RunError if there is no GPU, NCCL is missing or has a known defect, or torch's watchdog is on.
    """

    takes_gpus = has_shards = True
    environment: ClassVar[Mapping[str, str]] = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch's watchdog ends the process before the generation does
        "TORCH_NCCL_ENABLE_MONITORING": "0",  # the same, when the watchdog itself waits for an abort
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else each death writes the operations of all processes to the logs
        "CUDA_MODULE_LOADING": "EAGER",  # a kernel that loads at its first use waits for receives that spin
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # else streams share 8 queues, and a waiting lane may hold up computation
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic matrix products
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # cudaFree waits for receives that spin
    }

    def __init__(self, settings: TransportSettings) -> None:
        require_usable(settings.device)
        super().__init__(settings)

    @classmethod
    def refusal(cls, job: Job) -> str | None:
        if not computes_on_gpu(job):
            return '[membership] transport: "nccl", but no stage computes on a GPU here; leave it at "auto"'
        return refusal_of_nccl(job.membership.ports)

    @classmethod
    def require_machine(cls, processes: int) -> None:
        gpus = torch.cuda.device_count()
        if processes > gpus:
            raise JobError(
                f"{processes} workers on this machine, but {gpus} GPUs: NCCL needs one for each; set"
                ' [membership] transport = "staged" to share GPUs'
            )

    def _form(self, groups: GroupsOfGeneration) -> LaneTransport:
        return NcclTransport(self, groups)

    def draw_stream(self) -> int:
        stream: Any = torch.cuda.Stream(self.settings.device, priority=-1)  # type: ignore[no-untyped-call]
        return int(stream.cuda_stream)


class NcclTransport(LaneTransport):
    def _make(self, name: str, rank: int, size: int, ctas: int | None) -> Any:
        store, seconds = PrefixStore(name, self._store), self._settings.limits.form_timeout
        with torch.cuda.device(self._device):
            return nccl_group(store, rank, size, seconds, self._device, ctas)

    def _has_failed(self, backend: Any) -> bool:
        return nccl_has_failed(backend)

    def _multiprocessors(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    def _abort(self, groups: Sequence[Any]) -> None:
        with nccl_batch(groups[0]):
            for group in groups:
                with contextlib.suppress(RuntimeError):
                    group.abort()

    def _mark(self) -> Callable[[], bool]:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return lambda: bool(event.query())

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def require_usable(device: torch.device) -> None:
    """Raise RunError that names what NCCL lacks in this process."""
    if device.type != "cuda":
        raise RunError("NCCL: no GPU is visible here")
    if not dist.is_nccl_available():
        raise RunError("NCCL: this torch was built without it")
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version in UNFIT_VERSIONS:
        raise RunError(f"NCCL {'.'.join(map(str, version))}: its abort is known to hang; use a newer one")
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
        raise RunError("TORCH_NCCL_ASYNC_ERROR_HANDLING must be 0, or torch ends the process when a peer dies")
