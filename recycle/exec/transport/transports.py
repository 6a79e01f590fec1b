"""Which transport a run's processes use, and how each is opened for a generation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from recycle.errors import JobError
from recycle.exec.transport.gloo import GlooTransport
from recycle.exec.transport.groups import GroupTransport
from recycle.exec.transport.lanes import Lane, LaneTransport, lanes_of
from recycle.exec.transport.nccl import nccl_communicators
from recycle.ir.instruction import Instruction
from recycle.job import Job
from recycle.shape import Worker


def transport_of(job: Job, gpus: int | None = None) -> Literal["gloo", "nccl"]:
    """The transport that `[membership] transport` asks for here: "auto" is NCCL where stages compute on GPUs.

    Args:
        gpus: that are visible here; looked up when left out.

    Raises:
        JobError: it cannot move what the stages make.
    """
    gpus = torch.cuda.device_count() if gpus is None else gpus
    wanted, computes = job.membership.transport, job.model.kind == "gpt" and gpus > 0
    if wanted == "nccl" and not computes:
        raise JobError('[membership] transport: "nccl", but no stage computes on a GPU here; leave it at "auto"')
    if wanted == "gloo" and computes:
        raise JobError(
            '[membership] transport: "gloo" moves CPU tensors; hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on CPUs'
        )
    if computes and job.grid.tensor_parallel > 1:
        raise JobError("[shape] tensor_parallel: only 1 with NCCL for now")
    return "nccl" if computes else "gloo"


def require_gpus(job: Job, processes: int, gpus: int | None = None) -> None:
    """Raise JobError when stages compute on GPUs and `processes` on this machine have not one each."""
    gpus = torch.cuda.device_count() if gpus is None else gpus
    if transport_of(job, gpus) == "nccl" and processes > gpus:
        raise JobError(
            f"{processes} workers on this machine, but {gpus} GPUs: NCCL wants one for each; on one GPU run the"
            f" schedule in one process, recycle.exec.run(schedule, job)"
        )


@dataclass(frozen=True)
class Transports:
    """Opens the transport of each generation in one process.

    Attributes:
        job: the job.
        store: torch store client that groups form on.
        device: that this process computes on.
        address: of this machine, by which peers reach it.
        tensor: (rank, size) inside the worker.
    """

    job: Job
    store: Any
    device: torch.device
    address: str
    tensor: tuple[int, int] = (0, 1)

    def open(
        self,
        prefix: str,
        role: Worker,
        members: Sequence[Worker],
        program: Sequence[Instruction],
        joins: Collection[Lane],
        hosts: Mapping[int, Sequence[Worker]],
        message: tuple[tuple[int, ...], torch.dtype],
        over: threading.Event,
        waiting: Callable[[bool], None],
    ) -> GroupTransport:
        """The transport of a generation; arguments as `GlooTransport` and `LaneTransport` take them.

        Raises:
            TransportError: its groups did not form.
        """
        membership = self.job.membership
        if transport_of(self.job) == "nccl":
            made = nccl_communicators(self.store, self.device, membership.form_timeout)
            lanes = lanes_of(role, program, joins)
            return LaneTransport(made, prefix, role, lanes, hosts, message, over=over, waiting=waiting)
        return GlooTransport(
            self.store,
            prefix,
            role,
            members,
            hosts,
            message,
            timeout=membership.transport_timeout,
            answer_timeout=membership.dead_after,
            form_timeout=membership.form_timeout,
            over=over,
            waiting=waiting,
            address=self.address,
            tensor=self.tensor,
        )
