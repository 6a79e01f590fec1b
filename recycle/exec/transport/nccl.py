"""NCCL communicators for transports between GPUs. Not yet run: it needs several GPUs (see docs/transports.md).

What is known of NCCL's failures decides the design. A dead peer leaves kernels that spin for ever and no error, so
nobody's death is ever learned from NCCL: heartbeats and process ends tell, and the watch thread then aborts every
communicator of this process, which is what lets the spinning kernels end. Every communicator is made here and by
itself, never split from another, since an abort does not reach split ones. After an abort nothing that was on its
stream is valid: the iteration starts again from the committed step. A new generation forms under names of its own, and
only once all have acknowledged that they left the old one, so that no one aborts while another initialises.
torch's own watchdog must not end the process meanwhile: `ENVIRONMENT` switches it off before torch is imported.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from recycle.errors import RunError
from recycle.exec.transport.lanes import Communicators

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch's watchdog ends the process before the generation does
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # likewise, when the watchdog itself is stuck behind an abort
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic matrix products
}
"""What worker processes on GPUs are started with."""
_STANDING: list[Any] = []
UNFIT_VERSIONS = ((2, 17, 1), (2, 25, 1))
"""Versions whose abort is reported to hang: pytorch issues 119215 and 149153."""


def nccl_communicators(store: Any, device: torch.device, form_timeout: float) -> Communicators:
    """Communicators over NCCL that form on `store`.

    Args:
        store: a torch store client.
        device: this process's GPU, its own alone: NCCL refuses two ranks on one.
        form_timeout: seconds that forming one may take.

    Raises:
        RunError: no GPU, an NCCL that cannot be relied on, or torch's watchdog is on.
    """
    require_usable(device)

    def make(name: str, rank: int, size: int) -> Any:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=form_timeout)
        with torch.cuda.device(device):
            _STANDING.append(nccl(PrefixStore(name, store), rank, size, options))
        return _STANDING[-1]

    return Communicators(device, make, _release, lambda: torch.cuda.synchronize(device))


def abort_all() -> None:
    """Abort every communicator of this process, from any thread: what waits on one here wakes up."""
    for group in list(_STANDING):
        _release(group)


def _release(group: Any) -> None:
    with contextlib.suppress(ValueError):  # another thread was first
        _STANDING.remove(group)
        with contextlib.suppress(RuntimeError):
            group.abort()


def require_usable(device: torch.device) -> None:
    """Raise RunError that names what is missing for NCCL in this process."""
    if device.type != "cuda":
        raise RunError("NCCL: no GPU is visible here")
    if not dist.is_nccl_available():
        raise RunError("NCCL: this torch was built without it")
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version in UNFIT_VERSIONS:
        raise RunError(f"NCCL {'.'.join(map(str, version))}: its abort is known to hang; use a newer one")
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
        raise RunError("TORCH_NCCL_ASYNC_ERROR_HANDLING must be 0, or torch ends the process when a peer dies")
