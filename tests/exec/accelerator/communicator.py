"""Communicators of the simulated accelerator, which behave like NCCL's, over TCP between processes.

- Forming blocks until all ranks have come, and each end may fail alone. It takes memory of the device, and a stream of
  its pool, which other communicators may have too.
- An operation is queued on the communicator's stream after all computations queued so far, and the call returns; `wait`
  orders later computations after it, and returns too. Its buffer is full of NaN until the data arrives.
- A kernel spins until its peer comes. A dead peer, or one with a closed connection, never comes: only an abort ends the
  kernel.
- A sender waits until its receiver has come: nothing is buffered.
- The abort of a single communicator ends its kernels and then waits for the whole device, on which another communicator
  may spin: a deadlock. An abort of a group ends the kernels of all first.
- Tensors of an operation are kept until a wait for it.
- An operation holds a multiprocessor for each of its thread blocks.
- A broken link, or a dead peer, leaves spinning kernels and an error that no call raises. Operations then count as
  completed at once, while their kernels spin; the watchdog finds the error later (`has_failed`).
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tests.exec.accelerator.device import Device

ID_BYTES = 128
"""Size of rank 0's binary key in the store, as of an `ncclUniqueId`."""
CTAS = 32
"""Thread blocks of an operation, without a limit."""
SPIN_SECONDS = 0.02
WATCHDOG_SECONDS = 0.1
_ADDRESS = struct.Struct("!H4s16s")


class Work:
    """A queued operation."""

    def __init__(self, communicator: Communicator, done: threading.Event):
        self._communicator, self._done = communicator, done

    def wait(self) -> bool:
        """Let later computations wait for the operation; returns at once."""
        self._communicator.device.wait(self._done)
        self._communicator.kept.pop(self, None)
        return True

    def is_completed(self) -> bool:
        return self._done.is_set() or self._communicator.failed_at < math.inf


class Aborted(Exception):
    """The kernel's communicator was aborted."""


class Communicator:
    """One rank's end.

    Args:
        device: of this process.
        store: torch store, for this communicator alone.
        rank, size: as for any torch backend.
        address: of this machine.
        seconds: after which it gives up forming with RuntimeError.
        ctas: most thread blocks of an operation; by default `CTAS`.

    Attributes:
        kept: tensors of each operation without a wait for it.
        failed_at: when its link broke.
    """

    def __init__(
        self,
        device: Device,
        store,
        rank: int,
        size: int,
        address="127.0.0.1",
        seconds=60.0,
        ctas: int | None = None,
    ):
        device.check()
        device.make_communicator()
        self.failed_at, self._blocks = math.inf, min(ctas or CTAS, device.limits.multiprocessors)
        self.device, self._rank, self._size, self._ranks = device, rank, size, range(size)
        self.kept = {}
        self._aborted = threading.Event()
        try:
            self._peers = self._gather(store, address, seconds) if rank == 0 else {0: self._join(store, seconds)}
        except RuntimeError:
            device.free_communicator()
            raise
        for peer in self._peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(None)
        self._stream = device.draw()

    def _gather(self, store, address: str, seconds: float) -> dict[int, socket.socket]:
        """Rank 0: write the address to the store, and wait for all others."""
        secret = os.urandom(16)
        with socket.create_server((address, 0)) as listener:
            blob = _ADDRESS.pack(listener.getsockname()[1], socket.inet_aton(address), secret)
            store.set("unique id", blob.ljust(ID_BYTES, b"\xff"))
            deadline, peers = time.monotonic() + seconds, {}
            while len(peers) < self._size - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    raise RuntimeError("not all ranks came") from None
                hello = peer.recv(20, socket.MSG_WAITALL)
                if len(hello) == 20 and hello[4:] == secret:
                    peers[struct.unpack("!I", hello[:4])[0]] = peer
            for peer in peers.values():
                try:
                    peer.sendall(b"g")
                except OSError:
                    continue  # it has died since; rank 0 does not notice
        return peers

    def _join(self, store, seconds: float) -> socket.socket:
        blob = store.get("unique id")
        port, packed, secret = _ADDRESS.unpack(blob[: _ADDRESS.size])
        try:
            peer = socket.create_connection((socket.inet_ntoa(packed), port), seconds)
            peer.sendall(struct.pack("!I", self._rank) + secret)
            if peer.recv(1) != b"g":
                raise RuntimeError("rank 0 has gone")
        except OSError as error:
            raise RuntimeError(f"rank 0 does not answer: {error}") from None
        return peer

    def send(self, tensors: list[torch.Tensor], peer: int, tag=0) -> Work:
        (tensor,) = tensors

        def kernel():
            self._read(peer, 1)
            self._write(peer, _bytes(tensor))

        return self._queue(kernel, [tensor])

    def recv(self, tensors: list[torch.Tensor], peer: int, tag=0) -> Work:
        (tensor,) = tensors

        def kernel():
            spoil(tensor)
            self._write(peer, b"r")
            self._receive(peer, tensor)

        return self._queue(kernel, [tensor])

    def allreduce(self, tensors: list[torch.Tensor], options=None) -> Work:
        """The sum, in the order of the ranks, on all ranks."""
        assert options is None or options.reduceOp == dist.ReduceOp.SUM
        (tensor,) = tensors
        return self._collect([tensor], tensors, lambda parts: [[_sum(parts)]] * self._size)

    def reduce(self, tensors: list[torch.Tensor], options) -> Work:
        """The sum, in the order of the ranks, on the root; other tensors are unchanged."""
        (tensor,), root = tensors, options.rootRank
        taken = tensors if self._rank == root else []
        return self._collect([tensor], taken, lambda parts: [[_sum(parts)] * (rank == root) for rank in self._ranks])

    def broadcast(self, tensors: list[torch.Tensor], options) -> Work:
        """The root's tensor, on all ranks."""
        (tensor,), root = tensors, options.rootRank
        taken = [] if self._rank == root else tensors  # the root's tensor may be read meanwhile
        return self._collect([tensor], taken, lambda parts: [[parts[root]] * (rank != root) for rank in self._ranks])

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> Work:
        """Every rank's tensor, on all ranks."""
        (taken,), (tensor,) = outputs, tensors
        return self._collect([tensor], taken, lambda parts: [parts] * self._size)

    def alltoall(self, outputs: list[torch.Tensor], tensors: list[torch.Tensor]) -> Work:
        """From every rank the tensor for this one."""
        return self._collect(
            tensors, outputs, lambda parts: [[part.chunk(self._size)[rank] for part in parts] for rank in self._ranks]
        )

    def _collect(
        self,
        given: Sequence[torch.Tensor],
        taken: Sequence[torch.Tensor],
        combine: Callable[[list[torch.Tensor]], Sequence[Sequence[torch.Tensor]]],
    ) -> Work:
        """Rank 0 combines the tensors of all ranks into the results of each rank."""

        def kernel():
            parts = [torch.cat(given) if len(given) > 1 else given[0].clone() for _ in self._ranks]
            for tensor in taken:
                spoil(tensor)
            if self._rank:
                self._write(0, _bytes(parts[0]))
                for tensor in taken:
                    self._receive(0, tensor)
                return
            for peer in self._peers:
                self._receive(peer, parts[peer])
            own, *others = combine(parts)
            for peer, results in enumerate(others, 1):
                for result in results:
                    self._write(peer, _bytes(result))
            for tensor, result in zip(taken, own, strict=True):
                tensor.copy_(result)

        return self._queue(kernel, [*taken, *given])

    def _queue(self, kernel: Callable[[], None], tensors: list[torch.Tensor]) -> Work:
        if self._aborted.is_set():
            raise RuntimeError("the communicator was aborted")
        before = self.device.reached()

        def run():
            if self.device.failed:  # no result to send
                return
            try:
                kernel()
            except Aborted:
                return

        self._stream.launch(before.wait, waits=True)
        work = Work(self, self._stream.launch(run, blocks=self._blocks))
        self.kept[work] = tensors
        return work

    def _receive(self, peer: int, tensor: torch.Tensor):
        flat = tensor.detach().view(-1).view(torch.uint8)
        raw = self._read(peer, flat.numel())
        flat.copy_(torch.frombuffer(raw, dtype=torch.uint8))

    def _read(self, peer: int, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            self._spin([self._peers[peer]], [])
            try:
                piece = self._peers[peer].recv(count - len(data))
            except OSError:
                piece = b""
            if not piece:
                self._never()
            data += piece
        return data

    def _write(self, peer: int, raw: bytes):
        remaining = memoryview(raw)
        while remaining:
            self._spin([], [self._peers[peer]])
            try:
                remaining = remaining[self._peers[peer].send(remaining, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                continue
            except OSError:
                self._never()

    def _spin(self, readable: Sequence[socket.socket], writable: Sequence[socket.socket]):
        while not self._ended():
            if any(select.select(readable, writable, [], SPIN_SECONDS)):
                return
        raise Aborted

    def _ended(self) -> bool:
        """Whether its kernels end: it was aborted, or the device failed."""
        return self._aborted.is_set() or self.device.failed

    def has_failed(self) -> bool:
        """Whether the watchdog has seen an error."""
        return time.monotonic() - self.failed_at > WATCHDOG_SECONDS

    def break_link(self):
        """Break the link, as a network adapter that dies: nothing arrives any more at any end."""
        self.failed_at = min(self.failed_at, time.monotonic())
        for peer in self._peers.values():
            peer.shutdown(socket.SHUT_RDWR)

    def _never(self):
        """The peer never comes, which a kernel cannot know."""
        self.failed_at = min(self.failed_at, time.monotonic())
        while not self._ended():
            self._aborted.wait(SPIN_SECONDS)
        raise Aborted

    def _end_kernels(self):
        self.device.abort()
        self._aborted.set()

    def _free(self):
        self.device.free_communicator()
        for peer in self._peers.values():
            peer.close()


def abort_group(communicators: Sequence[Communicator]):
    """Abort communicators of one process together."""
    for communicator in communicators:
        communicator._end_kernels()
    for communicator in communicators:
        communicator._free()


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def spoil(tensor: torch.Tensor):
    """Fill a buffer whose data has not arrived."""
    with torch.no_grad():
        tensor.fill_(math.nan if tensor.is_floating_point() else 0x7F)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
