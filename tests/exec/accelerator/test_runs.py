"""Training on the simulated accelerator through faults has the losses and states of the calm run over gloo."""

import re
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random

import pytest

from recycle.exec.faults.kinds import KINDS
from recycle.job import PricedJob
from tests.exec.accelerator.struck import (
    STRUCK,
    STRUCK_AT,
    STUCK_AT,
    Failing,
    Hostile,
    Pinning,
    Stuck,
    Unplugged,
    over,
)
from tests.exec.accelerator.transport import SIMULATED, Simulated
from tests.exec.fault_matrix import ENDING, JOB, matrix_row, phases, steps_for
from tests.exec.runs import Run, assert_same_training, calm_run, events_of, job, kinds, of_kind, only, varied
from tests.exec.sharded import require_calm, sharded

SHORT = 9
ENDS_SILENTLY = "cut"
"""The kind of fault that NCCL and its simulation do not report; it has its own test."""


def small(kind="emulated", **sections: dict) -> PricedJob:
    """3 x 2 workers, whose steps are staggered."""
    membership = {"heartbeat": 0.1, "dead_after": 2.0}
    return job(3, 2, 2, kind=kind, **{"train": {"clip": 1e9, "warmup": 2}, "membership": membership} | sections)


def train(launch: Run, plugin: type[Simulated], *faults: str, directory: Path | None = None, **membership: float):
    """A run on simulated accelerators, which has the bits of one over gloo."""
    run = launch(over(plugin, small(), **membership), SHORT, *faults, directory=directory)
    assert_same_training(run, calm_run(small(), launch, SHORT))
    return run


@pytest.mark.parametrize(
    ("name", "struck"),
    [
        ("kill", ["middle", "reduce", "form", "copy"]),
        *(pytest.param(name, phases(KINDS[name]), marks=pytest.mark.soak) for name in ENDING if name != ENDS_SILENTLY),
    ],
)
def test_fault_is_detected_in_its_phases_and_changes_no_bit(name, struck, launch):
    steps = steps_for(struck)

    def strike(faults):
        return launch(over(Simulated, JOB), steps, *faults)

    assert matrix_row(name, struck, strike, calm_run(JOB, launch, steps))[-1] == "identical"


def test_unnoticed_cut_ends_at_the_transport_timeout_and_the_same_workers_form_again(launch):
    """They form twice if a process whose own timeout is not over keeps an idle communicator across the cut."""
    run = train(launch, Simulated, "cut=1.0:1.1@3", transport_timeout=3.0)
    first, fault, *again = [kind for kind in kinds(run) if kind != "undone"]
    assert (first, fault, set(again)) == ("generation", "fault", {"generation"})
    assert len(again) <= 2


def test_stuck_device_is_fenced_and_neither_a_slow_one_nor_hosts_with_full_launch_queues(launch):
    run = train(launch, Stuck, hung_after=2.0)
    death = only(run, "detected")
    assert (death["worker"], death["step"]) == (str(STRUCK), STUCK_AT)
    assert re.fullmatch(r"no progress for \S+ s in 1[FIWB]", death["cause"])


def test_only_the_worker_of_a_failed_accelerator_ends(launch, tmp_path):
    run = train(launch, Failing, directory=tmp_path)
    death = only(run, "detected")
    assert death["worker"] == str(STRUCK)
    assert death["step"] in (STRUCK_AT - 1, STRUCK_AT)  # others may still report the step before
    log = (tmp_path / "logs" / f"{STRUCK}.log").read_text()
    assert "cpu cannot be used any more by this process: accelerator error: IndexError: pop from empty list" in log


def test_processes_of_a_worker_compute_together_and_fail_together(launch):
    shape = {"tensor_parallel": 2, "sequence_parallel": True}
    pair = job(2, 1, 2, kind="gpt", shape=shape, train={"clip": 1e9, "warmup": 2})
    run = launch(over(Simulated, pair), 5, "kill:1.0t1@1", "rejoin:1.0@3")
    assert_same_training(run, calm_run(pair, launch, 5))
    assert kinds(run).count("detected") == 1
    assert run.metrics[-1]["live_workers"] == 2


SHARDED_STEPS = 9
PIECE = 1 << 14
"""Bytes of a piece of a background copy, so that a shard takes several iterations."""


def small_sharded(kind: str, precision: str) -> PricedJob:
    """3 x 2 workers, whose steps are staggered."""
    train = {"clip": 1e9, "precision": precision, "reduce_buckets": 2, "checkpoint_every": SHARDED_STEPS}
    limits = {"heartbeat": 0.1, "dead_after": 2.0}
    return job(3, 2, 2, kind=kind, train=train, membership=limits, model={"hidden": 64, "layers": 2})


def over_accelerators(replicated: PricedJob) -> PricedJob:
    return varied(sharded(replicated), train={"copy_bytes": PIECE}, membership={"transport": SIMULATED})


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
def test_sharded_optimizer_has_the_bits_of_the_replicated_one(kind, precision, faults, launch):
    replicated = small_sharded(kind, precision)
    run = launch(over_accelerators(replicated), SHARDED_STEPS, *faults)
    require_calm(run, replicated)
    assert "restored" not in kinds(run)
    assert kinds(run).count("detected") == sum(fault.startswith("kill") for fault in faults)


KILLS_APART = 4
"""Steps from one kill to the next."""


@pytest.mark.parametrize(
    ("kills", "seed"), [(4, 1), *(pytest.param(50, seed, marks=pytest.mark.soak) for seed in range(1, 11))]
)
def test_kills_at_random_instants_end_only_their_workers(kills, seed, launch):
    """Within 0.05 s of the beginning of a step; each worker returns two steps later."""
    random, steps = Random(seed), KILLS_APART * kills
    workers = [str(random.choice(list(JOB.shape.workers()))) for _ in range(kills)]
    faults = [
        text
        for step, worker in zip(range(1, steps, KILLS_APART), workers, strict=True)
        for text in (f"kill={random.uniform(0.0, 0.05):.4f}:{worker}@{step}", f"rejoin:{worker}@{step + 2}")
    ]
    config = varied(JOB, train={"checkpoint_every": 20})  # all hosts of a stage may die at once
    run = launch(over(Hostile, config, form_timeout=8.0), steps, *faults)
    assert_same_training(run, calm_run(JOB, launch, steps))
    struck = Counter(event["worker"] for event in of_kind(run, "fault"))
    dead = Counter(event["worker"] for event in of_kind(run, "detected"))
    assert dead <= struck
    assert struck.total() - dead.total() <= 0.02 * kills + 1  # two kills of a worker may strike the same process
    assert {event["cause"] for event in of_kind(run, "detected")} == {"killed by SIGKILL"}
    assert struck.total() > 0.9 * kills - 1  # some workers are dead already


def test_worker_whose_links_break_ends_and_its_peers_do_not(launch):
    run = train(launch, Unplugged)
    assert only(run, "detected")["worker"] == str(STRUCK)


def test_worker_that_allocates_pinned_memory_for_long_is_not_fenced_and_its_checkpoint_is_resumed(launch, tmp_path):
    pinned = small("gpt", train={"clip": 1e9, "warmup": 2, "checkpoint_every": 3, "undo": "host"})
    parts = over(Pinning, pinned, hung_after=1.0, warm_up=1.0)
    launch(parts, 5, directory=tmp_path)
    run = launch(parts, SHORT, directory=tmp_path, resume=True)
    assert events_of(tmp_path, "detected") == []
    reference = calm_run(small("gpt"), launch, SHORT)
    assert run.losses[-(SHORT - 5) :] == reference.losses[5:]
    assert run.digests == reference.digests
