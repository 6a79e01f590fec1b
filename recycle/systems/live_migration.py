"""Live migration: the role of a dead worker moves to a standby machine, and the iteration in progress goes on.

As hot spares, with nothing repeated. That is what commercial systems say of themselves; it is taken at their word here.
"""

from __future__ import annotations

from recycle.systems.hot_spare import HotSpare
from recycle.systems.system import Loss


class LiveMigration(HotSpare):
    """Standby nodes that take over a role within an iteration."""

    source = "TorchPass (commercial, claimed); TrainMover, arXiv 2412.12636 (claimed)"
    assumptions = (
        "the step in progress goes on after the pause, whatever the dead worker held of it (claimed, favourable)",
        "the role's state comes from a live peer; the pause is the common one",
        "checkpoints are written at Young's interval for one failure in a hundred",
    )
    limits = (
        "standby machines are paid for and train nothing",
        "more failures than standby machines restart everybody from a checkpoint",
    )
    name = "live_migration"
    loss = Loss.NOTHING
