"""The GPUs of this machine: their identity, their health, and the processors near them. Imports no torch.

Which GPU belongs to a place is decided once, at the start of the run, by UUID: numbers change when a GPU is lost.
Health and processors come from NVML, through `nvidia-ml-py` (extra `gpu`); without it all GPUs count as healthy. A GPU
is defective once it is gone, reports an Xid error that no program causes, or is worse than at the start: more
uncorrected memory errors, rows that wait for a remapping or cannot be remapped, NVLinks that are down.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from recycle.errors import RunError, first_line

XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""Xid errors that programs cause, by NVIDIA's catalog."""


def gpus_of(decided: Sequence[str], places: range) -> list[str]:
    """UUIDs of the GPUs of these local numbers; processes beyond the last GPU share them from the first."""
    return [decided[place % len(decided)] for place in places] if decided else []


def own_index(decided: Sequence[str], visible: Sequence[str], place: int) -> int:
    """Number by which this process now finds the GPU that was decided for its local number.

    `visible` are the UUIDs in the order of their present numbers. Raises RunError if the GPU is not among them.
    """
    if not decided:
        return place
    (uuid,) = gpus_of(decided, range(place, place + 1))
    if uuid not in visible:
        raise RunError(
            f"{uuid}, the GPU of local number {place} since the start of the run, is not visible here any more; repair"
            " it, or drain this worker"
        )
    return visible.index(uuid)


def nvml() -> Any:
    """The module of NVML, initialized; None if it is not installed or finds no driver."""
    try:
        library = import_module("pynvml")
        library.nvmlInit()
    except Exception:  # one of the module's own, which cannot be named without it
        return None
    return library


def stay_near(uuids: Sequence[str], place: int) -> None:
    """Let the calling thread, and threads that it starts later, run on the processors near its GPU, if NVML knows them.

    Memory that they allocate is then of the same NUMA node.
    """
    library = nvml() if uuids else None
    if library is None:
        return
    allowed = os.sched_getaffinity(0)
    with contextlib.suppress(library.NVMLError, OSError):
        gpu = library.nvmlDeviceGetHandleByUUID(gpus_of(uuids, range(place, place + 1))[0])
        words = library.nvmlDeviceGetCpuAffinity(gpu, (max(allowed) // 64) + 1)
        near = {64 * number + bit for number, word in enumerate(words) for bit in range(64) if word >> bit & 1}
        if near & allowed:
            os.sched_setaffinity(0, near & allowed)


def _links_down(library: Any, gpu: Any) -> int:
    down = 0
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(library.NVMLError):  # the GPU has fewer
            down += library.nvmlDeviceGetNvLinkState(gpu, link) == library.NVML_FEATURE_DISABLED
    return down


def _uncorrected_errors(library: Any, gpu: Any) -> int:
    kind = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return int(library.nvmlDeviceGetTotalEccErrors(gpu, kind, library.NVML_VOLATILE_ECC))


READINGS: Mapping[str, Callable[[Any, Any], int]] = {
    "uncorrected memory errors": _uncorrected_errors,
    "memory rows that wait for a reset to be remapped": lambda nvml, gpu: int(nvml.nvmlDeviceGetRemappedRows(gpu)[2]),
    "memory rows that cannot be remapped": lambda nvml, gpu: int(nvml.nvmlDeviceGetRemappedRows(gpu)[3]),
    "NVLinks that are down": _links_down,
}
"""What is read of a GPU -> function of the module and the GPU's handle; a larger number than before is a defect."""


class GpuHealth:
    """The health of some GPUs since this object was made; those that NVML does not know are left out."""

    def __init__(self, uuids: Sequence[str], library: Any) -> None:
        self._library = library
        self._xids: dict[str, int] = {}
        self._initial: dict[str, dict[str, int]] = {}
        self._events = None
        with contextlib.suppress(library.NVMLError):
            self._events = library.nvmlEventSetCreate()
        for uuid in dict.fromkeys(uuids):
            with contextlib.suppress(library.NVMLError):
                self._initial[uuid] = self.readings(uuid)
                gpu = library.nvmlDeviceGetHandleByUUID(uuid)
                library.nvmlDeviceRegisterEvents(gpu, library.nvmlEventTypeXidCriticalError, self._events)

    def readings(self, uuid: str) -> dict[str, int]:
        gpu, readings = self._library.nvmlDeviceGetHandleByUUID(uuid), {}
        for name, read in READINGS.items():
            try:
                readings[name] = read(self._library, gpu)
            except self._library.NVMLError as error:
                if error.value == self._library.NVML_ERROR_GPU_IS_LOST:
                    raise
        return readings

    def defects(self) -> dict[str, str]:
        """UUID of each defective GPU -> what is wrong with it."""
        self._take_xids()
        defects = {uuid: f"{uuid} has reported Xid error {xid}" for uuid, xid in self._xids.items()}
        for uuid, initial in self._initial.items():
            try:
                readings = self.readings(uuid)
            except self._library.NVMLError as error:
                defects[uuid] = f"{uuid} is lost: {error}"
                continue
            for name, count in readings.items():
                if (more := count - initial.get(name, 0)) > 0:
                    defects[uuid] = f"{uuid} has {more} more {name} than at the start of the run"
        return defects

    def _take_xids(self) -> None:
        with contextlib.suppress(self._library.NVMLError):  # a timeout when all are read
            while self._events is not None:
                event = self._library.nvmlEventSetWait_v2(self._events, 0)
                if event.eventData not in XIDS_OF_PROGRAMS:
                    self._xids[self._library.nvmlDeviceGetUUID(event.device)] = event.eventData


class GpuWatch:
    """Checks the GPUs of a node every `period` seconds and when asked, in a thread: a broken driver may not answer.

    Args:
        of_places: place -> UUIDs of its GPUs.
        period: 0 for no checks.
        wake: called after each check.
    """

    def __init__(self, of_places: Mapping[str, Sequence[str]], period: float, wake: Callable[[], None]) -> None:
        self._of_places, self._period, self._wake = of_places, period, wake
        self._defects: Mapping[str, str] = {}
        self._asked, self._answered = 0, 0
        self._is_asked, self._ended = threading.Event(), False
        if period and any(of_places.values()):
            threading.Thread(target=self._run, name="gpus", daemon=True).start()
        else:
            self._ended = True

    def check(self) -> None:
        """Ask for a check now."""
        self._asked += 1
        self._is_asked.set()

    @property
    def is_checking(self) -> bool:
        """Whether a check that was asked for has not ended."""
        return not self._ended and self._asked != self._answered

    def defect(self, place: str) -> str | None:
        """What was wrong with a GPU of a place at the last check; None if nothing was."""
        return next((self._defects[uuid] for uuid in self._of_places.get(place, ()) if uuid in self._defects), None)

    def close(self) -> None:
        self._ended = True
        self._is_asked.set()

    def _run(self) -> None:
        try:
            if (library := nvml()) is not None:
                self._check_until_closed(library)
        except Exception as error:  # a library without a function, say
            print(f"GPUs are not checked: {first_line(error)}", file=sys.stderr, flush=True)
        self._ended = True

    def _check_until_closed(self, library: Any) -> None:
        health = GpuHealth([uuid for uuids in self._of_places.values() for uuid in uuids], library)
        while not self._ended:
            asked = self._asked
            self._is_asked.clear()
            self._defects = health.defects()
            self._answered = asked
            self._wake()
            self._is_asked.wait(self._period)
