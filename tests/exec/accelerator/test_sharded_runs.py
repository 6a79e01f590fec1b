"""Hosts that share their optimizer's state, over the simulated accelerator: the bits of hosts that have all of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec
import pytest

from recycle.job import PricedJob
from tests.exec.accelerator.transport import SIMULATED
from tests.exec.runs import Run, calm_run, job, kinds
from tests.exec.sharded import bits, require_equal, sharded, stored

pytestmark = pytest.mark.process

STEPS = 9
PIECE = 1 << 14
"""Bytes of a piece that is copied after a death: a shard takes several iterations."""


def small(kind: str, precision: str) -> PricedJob:
    """3 x 2 workers, whose steps are staggered."""
    train = {"clip": 1e9, "precision": precision, "reduce_buckets": 2, "checkpoint_every": STEPS}
    limits = {"heartbeat": 0.1, "dead_after": 2.0}
    return job(3, 2, 2, kind=kind, train=train, membership=limits, model={"hidden": 64})


def over_accelerators(of: PricedJob) -> PricedJob:
    parts = sharded(of)
    return parts.with_sections(
        train=msgspec.structs.replace(parts.train, copy_bytes=PIECE),
        membership=msgspec.structs.replace(parts.membership, transport=SIMULATED),
    )


@pytest.mark.parametrize(
    ("kind", "precision", "faults"),
    [
        ("gpt", "bf16", ("kill:1.1@2.step", "rejoin:1.1@7")),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in product(
                ("emulated", "gpt"),
                ("fp32", "bf16"),
                ((), ("kill:1.1@3", "rejoin:1.1@6"), ("kill:0.0@2.reduce",), ("kill:2.0@4.gather", "nan:0.1@6")),
            )
            if each[:2] != ("emulated", "bf16")
        ),
    ],
)
def test_losses_and_states_are_those_of_hosts_that_have_all(
    kind: str, precision: str, faults: Sequence[str], launch: Run
) -> None:
    of = small(kind, precision)
    found, wanted = launch(over_accelerators(of), STEPS, *faults), calm_run(of, launch, STEPS)
    assert bits(found) == bits(wanted)
    assert "restored" not in kinds(found)
    assert kinds(found).count("detected") == sum(fault.startswith("kill") for fault in faults)
    assert found.directory is not None
    assert wanted.directory is not None
    folder = f"checkpoints/step-{STEPS - 1:08d}"
    require_equal(stored(Path(found.directory) / folder), stored(Path(wanted.directory) / folder))
