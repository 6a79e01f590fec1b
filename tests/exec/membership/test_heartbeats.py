"""Heartbeats are read by a thread: each failure detector gets each reading once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from recycle import RunError
from recycle.exec.leader.detector import Beats
from recycle.exec.membership.heartbeats import HeartbeatReader
from recycle.exec.membership.schema import HeartbeatKey
from recycle.exec.membership.store import RunStore
from recycle.exec.protocol import Heartbeat
from tests.exec.membership.test_takeover import store  # noqa: F401

BEAT = Heartbeat(3, 7, False, "1F", 0.5)


def reached(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while ((found := condition()) is None or found is False) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def counts(beats: Beats | None) -> list[int]:
    assert beats is not None
    return list(beats["beats"].tolist())


def test_each_detector_gets_each_reading_once(store: RunStore) -> None:  # noqa: F811
    store.set(HeartbeatKey("0.0"), BEAT)
    reader = HeartbeatReader(store.clone(), ["0.0", "0.1"], 60.0)
    one, other = reader.reading(), reader.reading()
    assert counts(reached(one)) == [3, -1]
    assert one() is None
    assert counts(other()) == [3, -1]
    assert other() is None
    reader.close()


def test_what_is_written_is_read_in_time_and_a_store_that_is_gone_is_an_error(
    store: RunStore,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = store.clone()
    reader = HeartbeatReader(client, ["0.0"], 0.01)
    read = reader.reading()
    assert counts(reached(read)) == [-1]
    store.set(HeartbeatKey("0.0"), BEAT)
    assert reached(lambda: (found := read()) is not None and counts(found) == [3])

    def gone(*given: object) -> None:
        raise RunError("the store is gone")

    monkeypatch.setattr(client, "answers", gone)
    with pytest.raises(RunError, match="the store is gone"):
        reached(lambda: read() is not None and False)
    reader.close()
