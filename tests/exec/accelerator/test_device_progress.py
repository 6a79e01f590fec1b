"""What a heartbeat says of a device that runs behind its host: it computes, waits for a peer, or stands still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from recycle.exec.device import Clock, DeviceProgress, Progress
from tests.exec.accelerator.device import Device, DeviceClock


class Process:
    """A host with a device, whose main thread waits for a decision all the time."""

    def __init__(self, clock: Clock) -> None:
        self.given, self.waits = DeviceProgress(clock), False
        self.progress = Progress(lambda: replace(self.given.state(), waits=self.waits))
        self.progress.begins("REDUCE")
        self.progress.set_waiting(True)

    def give(self, doing: str, action: Callable[[], object]) -> None:
        """Have the device do something."""
        began = self.given.clock.mark()
        action()
        self.given.record_given(doing, began, self.given.clock.mark())

    @property
    def said(self) -> tuple[bool, str, float | None]:
        beat = self.progress.heartbeat(0)
        return beat.waiting, beat.doing, beat.longest


@pytest.fixture
def device() -> Device:
    return Device(eager=True)


def test_a_host_that_waits_while_its_device_computes_does_not_wait(device: Device) -> None:
    process, gate = Process(DeviceClock(device)), threading.Event()
    process.give("0F", lambda: device.launch(gate.wait))
    process.give("0B", lambda: device.launch(lambda: None))
    before = process.progress.heartbeat(0).progress
    assert process.said == (False, "0F", None)
    gate.set()
    device.synchronize()
    assert process.said == (True, "REDUCE", None)
    assert process.progress.heartbeat(0).progress == before + 2


def test_a_device_that_stands_still_makes_no_progress_whatever_its_host_waits_for(device: Device) -> None:
    process, never = Process(DeviceClock(device)), threading.Event()
    process.give("0F", lambda: device.launch(never.wait))
    beats = [process.progress.heartbeat(number) for number in range(3)]
    assert len({beat.progress for beat in beats}) == 1
    assert not any(beat.waiting for beat in beats)
    never.set()


def test_a_device_that_has_come_to_an_operation_whose_peer_has_not_waits(device: Device) -> None:
    process, gate = Process(DeviceClock(device)), threading.Event()
    process.progress.set_waiting(False)  # the host stands in a launch
    process.give("0F", lambda: device.launch(gate.wait))
    process.waits = True
    assert process.said == (True, "REDUCE", None)
    gate.set()


def test_an_operation_is_held_against_what_the_device_took_for_one_of_its_kind(device: Device) -> None:
    process, gate = Process(DeviceClock(device)), threading.Event()
    process.give("0F", lambda: device.launch(lambda: time.sleep(0.2)))
    process.give("0B", lambda: device.launch(lambda: None))
    device.synchronize()
    process.given.state()
    process.give("0F", lambda: device.launch(gate.wait))
    waiting, doing, longest = process.said
    assert (waiting, doing) == (False, "0F")
    assert longest is not None
    assert longest >= 0.2
    gate.set()


def test_what_was_given_in_a_generation_that_is_over_counts_no_more(device: Device) -> None:
    process, never = Process(DeviceClock(device)), threading.Event()
    process.give("0F", lambda: device.launch(never.wait))
    process.given.forget()
    assert process.said == (True, "REDUCE", None)
    never.set()


def test_a_mark_has_the_time_at_which_the_device_came_to_it(device: Device) -> None:
    clock, gate = DeviceClock(device), threading.Event()
    device.launch(gate.wait)
    mark = clock.mark()
    assert not mark.reached()
    opened = time.monotonic()
    gate.set()
    device.synchronize()
    assert mark.reached()
    assert opened <= mark.seconds() <= time.monotonic()
