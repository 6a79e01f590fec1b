"""Heartbeats of a host with an asynchronous device: it computes, waits for a peer, or makes no progress."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from recycle.exec.device import DeviceProgress, Progress
from tests.exec.accelerator.device import Device, DeviceClock


class Process:
    """A host whose main thread waits for a decision, and its device."""

    def __init__(self):
        self.device = Device(eager=True)
        self.queued, self.waits = DeviceProgress(DeviceClock(self.device)), False
        self.progress = Progress(lambda: replace(self.queued.state(), waits=self.waits))
        self.progress.begin_operation("REDUCE")
        self.progress.set_waiting(True)

    def launch(self, operation: str, kernel: Callable[[], object]):
        began = self.queued.clock.mark()
        self.device.launch(kernel)
        self.queued.record_queued(operation, began, self.queued.clock.mark())

    @property
    def reported(self) -> tuple[bool, str, float | None]:
        beat = self.progress.heartbeat(0)
        return beat.waiting, beat.doing, beat.longest


@pytest.fixture
def process():
    return Process()


def test_host_does_not_wait_while_its_device_computes(process):
    gate = threading.Event()
    process.launch("0F", gate.wait)
    process.launch("0B", lambda: None)
    beats = [process.progress.heartbeat(number) for number in range(2)]
    assert process.reported == (False, "0F", None)
    gate.set()
    process.device.synchronize()
    assert process.reported == (True, "REDUCE", None)
    assert beats[0].progress == beats[1].progress == process.progress.heartbeat(0).progress - 2


def test_device_that_waits_for_a_peer_counts_as_waiting(process):
    gate = threading.Event()
    process.progress.set_waiting(False)  # the host is blocked in a launch
    process.launch("0F", gate.wait)
    process.waits = True
    assert process.reported == (True, "REDUCE", None)
    gate.set()


def test_heartbeat_has_the_longest_time_of_the_operation_on_the_device(process):
    gate = threading.Event()
    process.launch("0F", lambda: time.sleep(0.2))
    process.launch("0B", lambda: None)
    process.device.synchronize()
    process.queued.state()
    process.launch("0F", gate.wait)
    waiting, operation, longest = process.reported
    assert (waiting, operation) == (False, "0F")
    assert longest >= 0.2
    gate.set()


def test_operations_of_an_ended_generation_are_forgotten(process):
    gate = threading.Event()
    process.launch("0F", gate.wait)
    process.queued.forget()
    assert process.reported == (True, "REDUCE", None)
    gate.set()
