"""The simulated communicators do what NCCL's do: each test is one thing that our code must live with.

The ranks are threads of this process, with a device each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from tests.exec.accelerator.communicator import Communicator, abort_group
from tests.exec.accelerator.device import Device

SOON = 0.1
"""Seconds in which what does not wait is done, so that a test sees what waits."""
Ranks = list[tuple[Device, Communicator]]


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def form(size: int, name: str = "lane", devices: Sequence[Device] = ()) -> Ranks:
    """A communicator between devices, one thread per rank."""
    devices = devices or [Device(eager=True) for _ in range(size)]
    store: Any = HashStore()
    with ThreadPoolExecutor(size) as pool:
        formed = [
            pool.submit(Communicator, device, PrefixStore(name, store), rank, size)
            for rank, device in enumerate(devices)
        ]
        return [(device, one.result()) for device, one in zip(devices, formed, strict=True)]


def end(*ranks: Ranks) -> None:
    """Abort all communicators that are not yet, those of a device together."""
    of: dict[Device, list[Communicator]] = {}
    for device, communicator in (pair for one in ranks for pair in one):
        if not communicator.is_aborted:
            of.setdefault(device, []).append(communicator)
    for group in of.values():
        abort_group(group)


@pytest.fixture
def both() -> Iterator[Ranks]:
    """A communicator of two ranks."""
    ranks = form(2)
    yield ranks
    end(ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_wait_returns_before_the_data_is_there_and_orders_what_is_computed_later(
    dtype: torch.dtype, both: Ranks
) -> None:
    (sends, sender), (receives, receiver) = both
    content, buffer, seen = torch.arange(6, dtype=dtype), torch.zeros(6, dtype=dtype), list[torch.Tensor]()
    receiving = receiver.recv([buffer], 0)
    receiving.wait()
    receives.launch(lambda: seen.append(buffer.clone()))
    assert not receiving.is_completed()
    assert seen == []
    sender.send([content], 1).wait()
    receives.synchronize()
    sends.synchronize()
    assert torch.equal(seen[0], content)


def test_a_peer_that_is_gone_is_one_that_does_not_come_until_an_abort(both: Ranks) -> None:
    (_, gone), (device, receiver) = both
    gone.abort()
    device.launch(lambda: None)
    receiving = receiver.recv([torch.empty(1)], 0)
    receiving.wait()
    host = in_thread(device.synchronize)
    host.join(SOON)
    assert host.is_alive()
    receiver.abort()
    host.join()


def test_to_abort_one_communicator_hangs_while_another_spins_and_to_abort_both_together_does_not() -> None:
    devices = [Device(eager=True) for _ in range(2)]
    first, second = form(2, "a", devices), form(2, "b", devices)
    (_, one), (_, other) = first[1], second[1]
    for communicator in (one, other):
        communicator.recv([torch.empty(1)], 0)
    alone = in_thread(one.abort)
    alone.join(SOON)
    assert alone.is_alive()
    other._tell()  # what a group would have done first
    alone.join()

    third, fourth = form(2, "c", devices), form(2, "d", devices)
    for _, communicator in (third[1], fourth[1]):
        communicator.recv([torch.empty(1)], 0)
    abort_group([third[1][1], fourth[1][1]])


@pytest.mark.parametrize(
    "call",
    [
        lambda device, one: one.recv([torch.empty(1)], 0),
        lambda device, one: device.synchronize(),
        lambda device, one: Communicator(device, HashStore(), 1, 2),
    ],
)
def test_an_error_of_the_device_shows_in_whatever_is_called_next(
    call: Callable[[Device, Communicator], None], both: Ranks
) -> None:
    device, one = both[1]
    device.launch(lambda: [].pop())
    device.drain()
    with pytest.raises(RuntimeError, match="accelerator error: IndexError"):
        call(device, one)
