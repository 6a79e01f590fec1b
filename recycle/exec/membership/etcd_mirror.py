"""A copy of a range of etcd's keys, kept current by one watch: reads and waits cost no request.

The range is read once, then followed from the next revision on; after a broken connection both begin again. A watch
that was silent for a while goes on at the next member, from where it was. A client
that has written waits until the copy has reached the revision of its write, so it reads what it wrote.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from recycle.errors import RunError
from recycle.exec.membership.etcd_client import PAUSE_SECONDS, Disconnected, EtcdClient, Silent, Watch, decoded


class Mirror:
    """The keys from `start` to before `end`.

    Args:
        client: of its own.

    Attributes:
        changes: how many there were so far.

    Raises:
        RunError: from every method, once the cluster has not answered for longer than the client's patience.
    """

    def __init__(self, client: EtcdClient, start: str, end: str) -> None:
        self._client, self._start, self._end = client, start, end
        self._values: dict[str, bytes] = {}
        self._revision, self.changes = 0, 0
        self._changed = threading.Condition()
        self._watch: Watch | None = None
        self._lost: str | None = None
        self._closed = False
        self._load()
        threading.Thread(target=self._follow, daemon=True).start()

    def covers(self, key: str) -> bool:
        """Whether `key` lies in the range."""
        return self._start <= key < self._end

    def get(self, key: str) -> bytes | None:
        """The value of `key`, None when it has none."""
        self.check()
        return self._values.get(key)

    def reach(self, revision: int) -> None:
        """Wait until the copy holds what the cluster held at `revision`, a change in the range."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended() or self._revision >= revision)
        self.check()

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for `condition` to hold, which is asked after every change; whether it does within `seconds`."""
        with self._changed:
            held = self._changed.wait_for(lambda: self._ended() or condition(), seconds)
        self.check()
        return held

    def close(self) -> None:
        """Stop following; every wait ends with RunError."""
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        if self._watch is not None:
            self._watch.close()

    def _ended(self) -> bool:
        return self._closed or self._lost is not None

    def check(self) -> None:
        """Raise RunError when the cluster is gone or the mirror was closed."""
        if self._lost is not None:
            raise RunError(self._lost)
        if self._closed:
            raise RunError("the store was closed")

    def _load(self) -> None:
        found, revision = self._client.range(self._start, self._end)
        with self._changed:
            self._values, self._revision = {name: held.value for name, held in found.items()}, revision
            self.changes += 1
            self._changed.notify_all()

    def _follow(self) -> None:
        pause, longest = PAUSE_SECONDS
        while not self._ended():
            try:
                self._watch = self._client.watch(self._start, self._end, self._revision + 1)
                if self._ended():
                    self._watch.close()
                for result in self._watch:
                    self._apply(result)
                    pause = PAUSE_SECONDS[0]
            except Silent:
                self._client.rotate()
                continue
            except (Disconnected, RunError):  # what is refused is refused by `_load`, too
                if self._ended():
                    return
                time.sleep(pause)
                pause = min(2 * pause, longest)
            try:
                self._load()
            except RunError as error:
                with self._changed:
                    self._lost = str(error)
                    self._changed.notify_all()
                return

    def _apply(self, result: dict[str, Any]) -> None:
        with self._changed:
            for event in result.get("events", []):
                kv = event["kv"]
                key = decoded(kv["key"]).decode()
                if event.get("type") == "DELETE":
                    self._values.pop(key, None)
                else:
                    self._values[key] = decoded(kv.get("value", ""))
                self.changes += 1
                self._revision = max(self._revision, int(kv["mod_revision"]))
            self._changed.notify_all()
