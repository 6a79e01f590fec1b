"""Activations that leave for the host and return: the storages that autograd saves in a forward.

Limits: the input and the output of the stage, and what layers keep without autograd, stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recycle.exec.device import copy_stream_of
from recycle.exec.model.stage import on_host
from recycle.ir.instruction import Compute, Offload
from recycle.job.shape import MicroBatch


class _Storage:
    """The bytes of one storage, uint8 [n]; `device` is None while they are only on the host, and vice versa."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device: Any = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.host: Any = None


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    held, dtype, *view = packed
    return torch.empty(0, dtype=dtype, device=held.device.device).set_(held.device.untyped_storage(), *view)


class SavedActivations:
    """What autograd saves in the forwards of the micro-batches that a program offloads.

    A storage is copied once, as a whole, whatever views of it are saved. Copies in the two directions run on streams of
    their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._out, self._back = device, copy_stream_of(device), copy_stream_of(device)
        self._leaving: set[MicroBatch] = set()
        self._saved: dict[MicroBatch, list[_Storage]] = {}
        self._copied: dict[MicroBatch, Callable[[], None]] = {}

    def expect(self, program: Sequence[Compute]) -> None:
        """Drop all activations, and keep those of the micro-batches that `program` offloads from now on."""
        self._leaving = {compute.micro_batch for compute in program if isinstance(compute, Offload)}
        self._saved, self._copied = {}, {}

    @contextmanager
    def saving(self, micro_batch: MicroBatch, module: torch.nn.Module) -> Iterator[None]:
        """Begin to copy what a forward of `module` inside the block saves, except its parameters and buffers."""
        if micro_batch not in self._leaving:
            yield
            return
        staying = (*module.parameters(), *module.buffers())
        stay = {0, *(tensor.untyped_storage().data_ptr() for tensor in staying)}
        storages: dict[int, _Storage] = {}

        def pack(tensor: Tensor) -> Any:
            is_plain = tensor.layout == torch.strided and tensor.device.type == self._device.type
            if not is_plain or (key := tensor.untyped_storage().data_ptr()) in stay:
                return tensor
            held = storages.setdefault(key, _Storage(tensor.untyped_storage()))
            return held, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
        # A layer that recomputes its output has emptied the storage.
        kept = self._saved[micro_batch] = []
        self._out.follow()
        for held in storages.values():
            if held.device.untyped_storage().nbytes():
                held.host = on_host(held.device)
                self._out.copy(held.host, held.device)
                kept.append(held)
        self._copied[micro_batch] = self._out.mark()

    def offload(self, micro_batch: MicroBatch) -> None:
        """Wait for the copy, and free the memory on the device."""
        self._copied.pop(micro_batch)()
        for held in self._saved[micro_batch]:
            held.device = None

    def reload(self, micro_batch: MicroBatch) -> None:
        """Begin to copy the activation back, into new memory."""
        self._back.follow()
        for held in self._saved.pop(micro_batch):
            held.device = torch.empty_like(held.host, device=self._device)
            self._back.copy(held.device, held.host)
            held.host = None
        self._copied[micro_batch] = self._back.mark()

    def wait_for(self, micro_batch: MicroBatch) -> None:
        """Let the backward wait for the activation."""
        if returned := self._copied.pop(micro_batch, None):
            returned()
