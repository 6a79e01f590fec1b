"""The simulated communicators do what NCCL's do: each test is one thing that our code must live with.

The ranks are threads of this process, with a device each.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from recycle.exec.transport.formation import FormingStore
from tests.exec.accelerator.communicator import Communicator, abort_group
from tests.exec.accelerator.device import Device
from tests.exec.accelerator.test_device import SOON, in_thread

Ranks = list[tuple[Device, Communicator]]


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


def test_who_reads_without_synchronising_sees_no_numbers(both: Ranks) -> None:
    (_, _), (device, receiver) = both
    buffer = torch.zeros(2)
    receiver.recv([buffer], 0).wait()
    while not math.isnan(buffer[0].item()):  # its kernel has started
        pass
    end(both)
    device.synchronize()
    assert bool(buffer.isnan().all())


def test_a_transfer_sends_what_is_computed_until_then_and_not_later(both: Ranks) -> None:
    (sends, sender), (receives, receiver) = both
    content, buffer, gate = torch.zeros(3), torch.empty(3), threading.Event()
    sends.launch(gate.wait)
    sends.launch(lambda: content.fill_(1.0))
    sender.send([content], 1).wait()
    sends.launch(lambda: content.fill_(2.0))
    receiver.recv([buffer], 0).wait()
    gate.set()
    receives.synchronize()
    assert buffer.tolist() == [1.0] * 3


def test_a_sender_waits_until_its_receiver_has_come(both: Ranks) -> None:
    (_, sender), (receives, receiver) = both
    sending = sender.send([torch.ones(1)], 1)
    threading.Event().wait(SOON)
    assert not sending.is_completed()
    receiver.recv([torch.empty(1)], 0)
    receives.synchronize()


def test_a_device_that_fails_ends_what_waits_on_it_and_sends_nothing_that_was_not_computed(both: Ranks) -> None:
    (failing, sender), (receives, receiver) = both
    another = form(2, devices=[failing, Device(eager=True)])
    gate, buffer = threading.Event(), torch.zeros(1)
    receiver.recv([buffer], 0)
    another[0][1].recv([torch.empty(1)], 1)  # nobody will send it
    failing.launch(lambda: gate.wait() and 1 // 0)
    sending = sender.send([torch.ones(1)], 1)
    gate.set()
    with pytest.raises(RuntimeError, match="accelerator error: ZeroDivisionError"):
        failing.synchronize()
    assert sending.is_completed()
    abort_group([receiver])
    receives.synchronize()
    assert bool(buffer.isnan().all())
    end(another)


def test_a_sum_and_a_gathering_have_everybodys_part_in_the_order_of_ranks() -> None:
    ranks = form(3)
    parts = [torch.tensor([1e16, 1.0], dtype=torch.float64), torch.ones(2).double(), torch.full((2,), -1e16).double()]
    originals, expected = torch.stack(parts), parts[0] + parts[1] + parts[2]
    gathered = [[torch.empty(2, dtype=torch.float64) for _ in range(3)] for _ in range(3)]
    for rank, (_, communicator) in enumerate(ranks):
        communicator.allgather([gathered[rank]], [parts[rank].clone()]).wait()
        communicator.allreduce([parts[rank]]).wait()
    for rank, (device, _) in enumerate(ranks):
        device.synchronize()
        assert torch.equal(parts[rank], expected)
        assert torch.equal(torch.stack(gathered[rank]), originals)
    end(ranks)


@pytest.mark.parametrize("root", [0, 2])
def test_a_sum_on_a_root_leaves_the_others_theirs_and_a_broadcast_gives_it_to_all(root: int) -> None:
    ranks = form(3)
    parts = [torch.full((2,), float(rank + 1)) for rank in range(3)]
    for rank, (_, communicator) in enumerate(ranks):
        options = dist.ReduceOptions()
        options.rootRank = root
        communicator.reduce([parts[rank]], options).wait()
    for rank, (device, _) in enumerate(ranks):
        device.synchronize()
        assert parts[rank].tolist() == [6.0 if rank == root else rank + 1.0] * 2
    for rank, (_, communicator) in enumerate(ranks):
        others = dist.BroadcastOptions()
        others.rootRank = root
        communicator.broadcast([parts[rank]], others).wait()
    for rank, (device, _) in enumerate(ranks):
        device.synchronize()
        assert parts[rank].tolist() == [6.0] * 2
    end(ranks)


def test_forming_blocks_until_the_last_has_come() -> None:
    store: Any = HashStore()
    formed: dict[int, Communicator] = {}

    def join(rank: int) -> None:
        formed[rank] = Communicator(Device(eager=True), store, rank, 3)

    threads = [in_thread(lambda rank=rank: join(rank)) for rank in (0, 2)]
    for thread in threads:
        thread.join(SOON)
    assert formed == {}
    join(1)
    for thread in threads:
        thread.join()
    assert formed.keys() == {0, 1, 2}
    for communicator in formed.values():
        communicator.abort()


def test_who_waits_for_rank_0_in_vain_is_woken_by_the_end_of_the_generation() -> None:
    over, said = threading.Event(), list[str]()
    client: Any = HashStore()
    patient = FormingStore(client, over)

    def join() -> None:
        try:
            Communicator(Device(eager=True), PrefixStore("lane", patient), 1, 2)
        except RuntimeError as error:
            said.append(str(error))

    thread = in_thread(join)
    thread.join(SOON)
    assert thread.is_alive()
    over.set()
    thread.join()
    assert "in vain" in said[0]


def test_forming_may_fail_at_one_end_only_and_the_other_then_spins() -> None:
    store: Any = HashStore()
    made: list[Communicator] = []
    device = Device(eager=True)
    thread = in_thread(lambda: made.append(Communicator(device, store, 0, 2)))
    blob = store.get("unique id")
    port, _, secret = struct.unpack("!H4s16s", blob[:22])
    with socket.create_connection(("127.0.0.1", port)) as dies:
        dies.sendall(struct.pack("!I", 1) + secret)
    thread.join()
    receiving = made[0].recv([torch.empty(1)], 1)
    threading.Event().wait(SOON)
    assert not receiving.is_completed()
    made[0].abort()
    assert receiving.is_completed()


def test_rank_0_gives_up_forming_after_a_while() -> None:
    store: Any = HashStore()
    with pytest.raises(RuntimeError, match="not all ranks came"):
        Communicator(Device(eager=True), store, 0, 2, seconds=SOON)


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


def test_an_aborted_communicator_refuses_work_and_its_buffers_hold_no_numbers(both: Ranks) -> None:
    (_, _), (device, receiver) = both
    buffer, seen = torch.zeros(1), list[float]()
    receiver.recv([buffer], 0).wait()
    device.launch(lambda: seen.append(buffer.item()))
    receiver.abort()
    assert math.isnan(seen[0])
    with pytest.raises(RuntimeError, match="aborted"):
        receiver.recv([buffer], 0)


def test_what_is_done_is_not_freed_until_somebody_waits_for_it(both: Ranks) -> None:
    (sends, sender), (receives, receiver) = both
    sending, receiving = sender.send([torch.ones(1)], 1), receiver.recv([torch.empty(1)], 0)
    sends.synchronize()
    receives.synchronize()
    assert sending.is_completed()
    assert receiving.is_completed()
    assert (len(sender.kept), len(receiver.kept)) == (1, 1)
    sending.wait()
    receiving.wait()
    assert (sender.kept, receiver.kept) == ({}, {})


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
