"""Heartbeats are read by a thread: each failure detector gets each reading once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from recycle import RunError
from recycle.exec.membership.heartbeats import HeartbeatReader
from recycle.exec.membership.messages import Heartbeat
from recycle.exec.membership.schema import HeartbeatKey
from recycle.exec.membership.store import RunStore
from tests.exec.membership.test_takeover import store  # noqa: F401

BEAT = Heartbeat(3, 7, False, "1F", 0.5)


def reached(condition: Callable[[], object]) -> object:
    deadline = time.monotonic() + 30
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def test_each_detector_gets_each_reading_once(store: RunStore) -> None:  # noqa: F811
    store.set(HeartbeatKey("0.0"), BEAT)
    reader = HeartbeatReader(store.clone(), ["0.0", "0.1"], 60.0)
    one, other = reader.reading(), reader.reading()
    assert reached(lambda: one(["0.1", "0.0"])) == [None, BEAT]
    assert one(["0.0"]) is None
    assert other(["0.0"]) == [BEAT]
    assert other(["0.0"]) is None
    reader.close()


def test_what_is_written_is_read_in_time_and_a_store_that_is_gone_is_an_error(
    store: RunStore,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = store.clone()
    reader = HeartbeatReader(client, ["0.0"], 0.01)
    read = reader.reading()
    assert reached(lambda: read(["0.0"])) == [None]
    store.set(HeartbeatKey("0.0"), BEAT)
    assert reached(lambda: read(["0.0"]) == [BEAT])

    def gone(*given: object) -> None:
        raise RunError("the store is gone")

    monkeypatch.setattr(client, "answers", gone)
    with pytest.raises(RunError, match="the store is gone"):
        reached(lambda: read(["0.0"]) == "never")
    reader.close()
