"""What the schema says of each key holds on both stores: where it lies, what its text means, how long it is kept."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import pytest

from recycle.exec.membership import schema
from recycle.exec.membership.coordinator import Coordinator, GenerationPhase
from recycle.exec.membership.etcd_store import EtcdStore
from recycle.exec.membership.launcher_store import LauncherStore
from recycle.exec.membership.schema import (
    AcknowledgedKey,
    CommitKey,
    Decision,
    Folder,
    FormedKey,
    Key,
    Note,
    ReportKey,
    TroubleKey,
    Writer,
    generation_folder,
)
from recycle.exec.membership.store import Store
from recycle.exec.protocol import VOID, Commit, Formed, Heartbeat, Report
from recycle.shape import Worker
from tests.exec.membership.test_takeover import LIVE, OnePlan, Still, store  # noqa: F401
from tests.exec.runs import job

KINDS = [kind for base in (Note, Decision) for kind in base.__subclasses__() if kind.__module__ == schema.__name__]


def names(store: Store) -> list[str]:  # noqa: F811
    """Every key that the store holds of its run."""
    if isinstance(store, LauncherStore):
        return store.names()
    assert isinstance(store, EtcdStore)
    prefix = store._prefix
    return [name.removeprefix(prefix) for name in store.client.range(prefix, prefix[:-1] + "0")[0]]


def test_the_name_of_a_key_says_its_folder_its_generation_its_kind_and_its_parts() -> None:
    assert ReportKey(3, 17, "1.0t1").name == "posts/generation00000003/report/17/1.0t1"
    assert schema.RegisterKey().name == "register/register"
    assert schema.KillRequestKey(Worker(1, 0)).name == "orders/killrequest/1.0"
    assert generation_folder(9) < generation_folder(10)


def test_no_two_kinds_of_key_share_names_and_workers_write_only_where_no_worker_follows() -> None:
    assert len({(kind.folder, kind._kind) for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert kind.folder in (
            (Folder.ORDERS, Folder.POSTS, Folder.BEATS, Folder.REGISTER)
            if kind.writer != Writer.WORKER
            else (Folder.POSTS, Folder.BEATS)
        )
        assert (kind.__doc__ or "").endswith("."), kind


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (CommitKey(1, 0), Commit(0, math.inf, 0.1 + 0.2, None)),
        (CommitKey(1, 0), VOID),
        (schema.FinalKey("0.0"), {3: "digest"}),
        (schema.HeartbeatKey("0.0"), Heartbeat(2**40, 7, False, "12REDUCE_GRAD", None)),
        (schema.EndedKey(Worker(0, 0)), (2, "killed by SIGKILL")),
        (schema.FormedKey(1, "0.0"), Formed("no route", True)),
        (schema.OutcomeKey(), 'quoted "text"'),
    ],
)
def test_a_value_comes_back_from_its_text(key: Key[Any], value: Any) -> None:
    assert key.decode(key.encode(value)) == value


class _OwnKey(Note[list[int]], writer=Writer.WORKER):
    """A key that the package does not know."""

    generation: int


def test_a_key_of_ones_own_is_one_class_and_reaches_whoever_follows_its_folder(store: Store) -> None:  # noqa: F811
    listener = store.clone()
    store.set(_OwnKey(2), [1, 2])
    assert listener.wait_for_change(60.0)
    assert listener.wait(_OwnKey(2), 60.0) == [1, 2]
    store.forget_before(2)
    assert store.has_all([_OwnKey(2)])
    store.forget_before(3)
    assert not store.has_all([_OwnKey(2)])


def test_of_all_generations_that_are_over_no_key_is_left(store: Store) -> None:  # noqa: F811
    """Each of eight generations undoes a step, forms, runs, commits and breaks."""
    clock = [time.monotonic()]
    undone: list[tuple[int, int]] = []
    coordinator = Coordinator(
        job=job(2, 1, 1),
        steps=99,
        live={Worker.parse(name) for name in LIVE},
        store=store,
        processes=Still(),
        plans=OnePlan(),
        log=lambda kind, **details: undone.append((details["step"], details["count"])) if kind == "undone" else None,
        committed=lambda commit, record: None,
        now=lambda: clock[0],
    )
    counts = []
    for generation in range(1, 9):
        coordinator.tick()
        for name in LIVE:
            store.set(AcknowledgedKey(generation, name), True)
        coordinator.tick()
        store.torch_store.set(f"{generation_folder(generation)}/world/0", "address")
        for name in LIVE:
            store.set(FormedKey(generation, name), Formed())
        coordinator.tick()
        assert coordinator.phase is GenerationPhase.RUNNING
        counts.append(len(names(store)))
        for _ in range(4):
            for name in LIVE:
                store.set(ReportKey(generation, coordinator.next_step, name), Report({0: [1.0]}, 0.5))
            coordinator.tick()
        store.set(TroubleKey(generation), "a connection broke")
        coordinator.tick()
        clock[0] += 2.0
        coordinator.tick()
    assert coordinator.record.committed == 31
    assert undone == [(4 * generation, 2) for generation in range(8)]
    assert counts == [counts[0]] * 8, names(store)
    assert {re.sub(r".*(generation\d+).*", r"\1", name) for name in names(store)} == {
        "orders/begun",
        "register/register",
        generation_folder(8),
    }
