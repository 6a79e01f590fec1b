"""How often to write a checkpoint: Young's rule (CACM 17(9), 1974).

With a write that stops training for w, failures at rate lam and u0 to restart, an interval dt leaves the share
`(1 - lam * (u0 + dt / 2)) / (1 + w / dt)` of the time for progress: the loss is uniform on the interval. It is best
near `dt = sqrt(2 w / lam)`, which holds while lam * dt is small (Daly, FGCS 22(3), 2006, has the next terms).
"""

from __future__ import annotations

from math import inf, sqrt

from recycle.systems.setting import Setting
from recycle.systems.system import Checkpoints


def young(write: float, rate: float) -> float:
    """The interval in seconds between writes of `write` seconds when state is lost `rate` times per second."""
    return sqrt(2 * write / rate) if rate else inf


def checkpoints(setting: Setting, nodes: int, fatal_share: float) -> Checkpoints | None:
    """How a system writes checkpoints when a share of the failures of so many nodes needs one; None for never.

    Training stops while workers copy their state to the host. Storage is written behind it, so that the next one
    cannot begin before that is done.
    """
    rate = setting.failure_rate * nodes * fatal_share
    if not rate:
        return None
    stall = setting.pauses.snapshot + setting.state_per_worker / setting.pauses.snapshot_bandwidth
    lag = setting.storage_seconds
    return Checkpoints(max(young(stall, rate), lag), stall, lag)
