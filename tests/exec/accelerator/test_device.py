"""The simulated accelerator does what CUDA does and a CPU does not."""

from __future__ import annotations

import threading

import pytest

from tests.exec.accelerator.device import Device

SOON = 0.1
"""Seconds in which what does not wait is done, so that a test sees what waits."""


def in_thread(action: object) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_a_launch_returns_before_its_kernel_runs_and_kernels_run_in_order() -> None:
    device, gate, ran = Device(eager=True), threading.Event(), list[int]()
    device.launch(gate.wait)
    for number in range(3):
        device.launch(lambda number=number: ran.append(number))
    assert ran == []
    gate.set()
    device.synchronize()
    assert ran == [0, 1, 2]


def test_to_wait_for_an_event_holds_up_what_is_computed_later_and_not_the_host() -> None:
    device, event, ran = Device(eager=True), threading.Event(), list[int]()
    device.wait(event)
    device.launch(lambda: ran.append(1))
    reached = device.reached()
    assert not reached.wait(SOON)
    assert ran == []
    event.set()
    device.synchronize()
    assert (ran, reached.is_set()) == ([1], True)


def test_a_full_launch_queue_blocks_the_host_until_a_kernel_has_run() -> None:
    device, gate = Device(queue=2, eager=True), threading.Event()
    device.launch(gate.wait)
    device.launch(lambda: None)
    host = in_thread(lambda: device.launch(lambda: None))
    host.join(SOON)
    assert host.is_alive()
    gate.set()
    host.join()
    device.synchronize()


def test_an_error_shows_in_a_later_call_and_in_every_one_after_it() -> None:
    device, ran = Device(eager=True), list[int]()
    device.launch(lambda: 1 // 0)
    device.drain()
    for call in (device.synchronize, device.reached, lambda: device.launch(lambda: ran.append(1))):
        with pytest.raises(RuntimeError, match="accelerator error: ZeroDivisionError"):
            call()
    assert ran == []


def test_what_is_computed_of_garbage_after_an_abort_is_no_error_until_the_device_was_idle() -> None:
    device = Device(eager=True)
    device.abort()
    device.launch(lambda: 1 // 0)
    device.synchronize()
    device.launch(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        device.synchronize()


@pytest.mark.parametrize("eager", [True, False])
def test_the_first_use_of_a_kernel_waits_for_the_device_unless_the_environment_has_it_loaded_already(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER" if eager else "LAZY")
    device, spin = Device(), threading.Event()
    device.launch(lambda: None, "gelu")
    device.drain()
    device.stream("another").launch(spin.wait)
    device.launch(lambda: None, "gelu")
    host = in_thread(lambda: device.launch(lambda: None, "softmax"))
    host.join(None if eager else SOON)
    assert host.is_alive() != eager
    spin.set()
    host.join()


@pytest.mark.parametrize("shared", [True, False])
def test_a_stream_that_waits_holds_up_others_of_its_work_queue_and_one_that_spins_does_not(shared: bool) -> None:
    device, spin, ran = Device(eager=True, connections=1 if shared else 3), threading.Event(), threading.Event()
    lane = device.stream("lane")
    lane.launch(spin.wait)
    device.launch(lambda: None)
    device.compute.drain()
    lane.launch(lambda: None)  # behind the one that spins
    device.launch(ran.set)
    assert ran.wait(SOON) != shared
    spin.set()
    device.synchronize()
    assert ran.is_set()
