"""A copy of a range of etcd's keys, kept current by one watch: reads and waits cost no request.

The range is read once, then followed from the next revision on; after a broken connection both begin again. A watch
that was silent for a while goes on at the next member, from where it was. A client that has written waits until the
copy has reached the revision of its write, so it reads what it wrote.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from recycle.errors import RunError
from recycle.exec.membership.copied import CopiedKeys, KeyChange
from recycle.exec.membership.etcd_client import CONNECTION_ERRORS, PAUSE_SECONDS, EtcdClient, decoded, span

WATCH_SECONDS = 10.0
"""Time without a message after which a watch continues at the next member, because this one may hang."""


class WatchTimeout(Exception):
    """No message for `WATCH_SECONDS`: nothing has changed, or the member hangs."""


class Watch:
    """A stream of the changes of keys from `start` to before `end`, from `revision` on.

    Raises CONNECTION_ERRORS and RunError, also while it is read, and WatchTimeout only then.
    """

    def __init__(self, client: EtcdClient, start: str, end: str, revision: int) -> None:
        request = {**span(start, end), "start_revision": revision, "fragment": True}
        self._connection, self._response = client.stream("/watch", {"create_request": request}, WATCH_SECONDS)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            while line := self._response.readline():
                result = json.loads(line).get("result")
                if result is None or result.get("canceled"):
                    return
                yield result
        except TimeoutError:
            raise WatchTimeout from None
        finally:
            self._connection.close()

    def close(self) -> None:
        """End the stream, also while another thread reads it."""
        with contextlib.suppress(OSError, AttributeError):  # the stream has ended already
            self._connection.sock.shutdown(socket.SHUT_RDWR)


class Mirror:
    """The keys from `start` to before `end`.

    Args:
        client: of its own.
        prefix: of all names, which the copy's names are without.

    Attributes:
        keys: the copy; it ends once the cluster has not answered for longer than the client's patience.
    """

    def __init__(self, client: EtcdClient, prefix: str, start: str, end: str) -> None:
        self._client, self._prefix, self._start, self._end = client, prefix, start, end
        self.keys = CopiedKeys()
        self._revision = 0
        self._watch: Watch | None = None
        self._load()
        threading.Thread(target=self._follow, daemon=True).start()

    def covers(self, name: str) -> bool:
        """Whether `name`, which begins with the prefix, lies in the range."""
        return self._start <= name < self._end

    def reach(self, revision: int) -> None:
        """Wait until the copy holds what the cluster held at `revision`, a change in the range."""
        self.keys.wait(lambda: self._revision >= revision, 3600.0)

    def close(self) -> None:
        """Stop following; every wait ends with RunError."""
        self.keys.end("the store was closed")
        if self._watch is not None:
            self._watch.close()

    def _load(self) -> None:
        found, revision = self._client.range(self._start, self._end)
        with self.keys.changed:
            self._revision = revision
            self.keys.replace({name.removeprefix(self._prefix): held.value for name, held in found.items()})

    def _follow(self) -> None:
        pause, longest = PAUSE_SECONDS
        while not self.keys.has_ended():
            try:
                self._watch = Watch(self._client, self._start, self._end, self._revision + 1)
                if self.keys.has_ended():
                    self._watch.close()
                for result in self._watch:
                    self._apply(result)
                    pause = PAUSE_SECONDS[0]
            except WatchTimeout:
                self._client.rotate()
                continue
            except (*CONNECTION_ERRORS, RunError):
                pass  # what is refused is refused by `_load`, too
            if self.keys.has_ended():
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)
            try:
                self._load()
            except RunError as error:
                self.keys.end(str(error))
                return

    def _apply(self, result: dict[str, Any]) -> None:
        changes: list[KeyChange] = []
        revision = self._revision
        for event in result.get("events", []):
            kv = event["kv"]
            name = decoded(kv["key"]).decode().removeprefix(self._prefix)
            changes.append((name, None if event.get("type") == "DELETE" else decoded(kv.get("value", ""))))
            revision = max(revision, int(kv["mod_revision"]))
        with self.keys.changed:
            self._revision = revision
            self.keys.apply(changes)
