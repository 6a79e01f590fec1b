"""What simulated workers compute: emulated stages whose norms vary and which tensor ranks cut, and late copies.

Copies have pieces of `PIECE` elements, so states are copied in several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import torch

import recycle.exec.emulation
import recycle.exec.worker.snapshots
import recycle.exec.worker.worker
from recycle.exec.device import HostCopies
from recycle.exec.emulation import ENTRIES, EmulatedStage
from tests.exec.explore.kernel import current

PIECE, SURGE = 5, 4.0
_draw = lru_cache(1 << 16)(recycle.exec.emulation._draw)


class LateCopies(HostCopies):
    """Copies that take place when the first wait for them ends, the latest time that a GPU's stream allows.

    Args:
        seconds: time that a call of `copy` takes.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._queued = seconds, list[tuple[torch.Tensor, torch.Tensor]]()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._queued.append((target, source))
        if self._seconds:
            current().process.kernel.park(seconds=self._seconds)

    def mark(self) -> Callable[[], None]:
        return self.settle

    def settle(self) -> None:
        queued, self._queued = self._queued, []
        for target, source in queued:
            target.copy_(source)


def simulated_stages(tensor_parallel: int, surges: Collection[int], copy_seconds: float) -> list[tuple[Any, str, Any]]:
    """What stands in for names of recycle: (module or class, name, value).

    Args:
        surges: steps whose gradients are `SURGE` times as large.
        copy_seconds: time that a copy of a piece takes.
    """
    entries = ENTRIES // tensor_parallel

    def draw(count: int, *key: Any) -> list[float]:
        if key[0] not in ("parameters", "gradient"):
            return _draw(count, *key)
        begin = 0
        if count and tensor_parallel > 1:
            begin, count = current().process.tensor_rank * entries, ENTRIES
        drawn = _draw(count, *key)[begin : begin + entries]
        return [SURGE * entry for entry in drawn] if key[0] == "gradient" and key[2] in surges else drawn

    def cuts(stage: EmulatedStage) -> Mapping[str, int | None]:
        return {f"layers.{number}.parameters": 0 for number in stage._numbers} if tensor_parallel > 1 else {}

    emulation = recycle.exec.emulation
    return [
        (emulation, "_draw", draw),
        (emulation, "ENTRIES", entries),
        (EmulatedStage, "cuts", cuts),
        (EmulatedStage, "replicated", lambda stage: range(0)),
        (recycle.exec.worker.snapshots, "piece_of_step", lambda device: PIECE),
        (recycle.exec.worker.worker, "copy_stream_of", lambda device: LateCopies(copy_seconds)),
    ]
