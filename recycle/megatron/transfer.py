"""Sends nested values with tensors between processes: their structure first, then one tensor after another.

The structure is read with torch's restricted unpickler, which runs no code of the sender.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recycle.errors import RunError, first_line
from recycle.exec.transport.groups import GroupTransport
from recycle.job.shape import Worker

_PLACE = "recycle.tensor"


def send_value(transport: GroupTransport, peer: Worker, value: Any) -> None:
    """Send dicts, lists, tuples, plain values and tensors to a peer, which calls `receive_value`."""
    tensors: list[Tensor] = []

    def place(tensor: Tensor) -> tuple[str, int]:
        tensors.append(tensor.detach())
        return _PLACE, len(tensors) - 1

    structure = _mapped(value, lambda leaf: place(leaf) if isinstance(leaf, Tensor) else leaf)
    content = pack((structure, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]))
    for parts in ([torch.tensor([content.numel()])], [content], [t.contiguous() for t in tensors if t.numel()]):
        transport.send_state(peer, parts)


def receive_value(transport: GroupTransport, peer: Worker) -> tuple[Any, int]:
    """Return the value of the peer's `send_value`, and its bytes.

    Raises RunError for a value with other objects than dicts, lists, tuples, plain values and tensors.
    """
    size = torch.zeros(1, dtype=torch.int64)
    transport.receive_state(peer, [size])
    content = torch.empty(int(size), dtype=torch.uint8)
    transport.receive_state(peer, [content])
    try:
        structure, layouts = unpack(content)
    except pickle.UnpicklingError as error:
        raise RunError(f"the state of worker {peer} cannot be read: {first_line(error)}") from None
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in layouts]
    transport.receive_state(peer, [tensor for tensor in tensors if tensor.numel()])
    value = _mapped(structure, lambda leaf: tensors[leaf[1]] if _is_place(leaf) else leaf)
    return value, int(size) + sum(tensor.nbytes for tensor in tensors)


def pack(value: Any) -> Tensor:
    """A value as bytes [any size]; `unpack` reads it."""
    written = io.BytesIO()
    torch.save(value, written)
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def unpack(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)


def _is_place(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] == _PLACE


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, list) or (isinstance(value, tuple) and not _is_place(value)):
        return type(value)([_mapped(entry, change) for entry in value])
    return change(value)
