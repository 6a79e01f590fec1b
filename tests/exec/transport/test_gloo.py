"""What gloo's transport holds in memory: sent tensors until they have arrived, and few buffers for what comes."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recycle.exec.transport.base import TransportError
from recycle.exec.transport.gloo import GlooTransport
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Receive, Send
from recycle.ir.lower import lower
from recycle.job.footprint import POSTED_AHEAD
from recycle.job.shape import Shape, Worker

PAIR = lower(one_f_one_b(Shape(1, 2, 8)))
FIRST, LAST = PAIR.live
LATE = 20.0


@pytest.fixture
def transports() -> Iterator[dict[Worker, GlooTransport]]:
    """Both workers of a pipeline, in threads of this process, in iteration 0."""
    settings = TransportSettings(HashStore())
    made = {
        role: GlooTransport(
            settings,
            GroupsOfGeneration(
                "g", role, PAIR.live, {}, ((4,), torch.float32), PAIR.program(role), over=threading.Event()
            ),
        )
        for role in PAIR.live
    }
    with ThreadPoolExecutor(2) as both:
        list(both.map(GlooTransport.form, made.values(), timeout=LATE))
    for role, transport in made.items():
        transport.begin(PAIR.program(role), 0)
    yield made
    for transport in made.values():
        transport.close()


def test_a_sent_tensor_is_let_go_of_once_it_has_arrived(transports: dict[Worker, GlooTransport]) -> None:
    sends = [one for one in PAIR.program(FIRST) if isinstance(one, Send)]
    receives = [one for one in PAIR.program(LAST) if isinstance(one, Receive)]
    tensors = [torch.full((4,), float(place)) for place in range(len(sends))]
    kept = [weakref.ref(tensor) for tensor in tensors]
    for send in sends:
        transports[FIRST].send(send, tensors.pop(0))
    # The receiver has posted buffers for the first ones; nobody has room for the others yet.
    _until_gone(kept[:POSTED_AHEAD], transports[FIRST])
    assert all(tensor() is not None for tensor in kept[POSTED_AHEAD:])
    arrived = [float(transports[LAST].receive(receive)()[0]) for receive in receives]
    assert arrived == [float(place) for place in range(len(sends))]
    _until_gone(kept, transports[FIRST])


@pytest.mark.parametrize("end", ["source", "receiver"])
def test_a_wait_for_a_state_ends_with_its_generation_though_no_socket_says_so(
    end: str, transports: dict[Worker, GlooTransport]
) -> None:
    """As where a transfer is posted in the moment in which sockets are shut."""
    role, peer = (FIRST, LAST) if end == "source" else (LAST, FIRST)
    transport, over = transports[role], transports[role]._over
    act = transport.send_state if end == "source" else transport.receive_state
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(act, peer, [torch.zeros(4)])
        try:
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
            over.set()
            with pytest.raises(TransportError, match="the generation is over"):
                waiting.result(LATE)
        finally:  # or its thread would never end
            for connection in transport._connections:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as one:
                    one.shutdown(socket.SHUT_RDWR)


def _until_gone(kept: list[weakref.ref[torch.Tensor]], transport: GlooTransport) -> None:
    deadline = time.monotonic() + LATE
    while any(tensor() is not None for tensor in kept):
        assert time.monotonic() < deadline
        time.sleep(0.001)
        transport._drop_sent(-2)  # as the next transfer does
