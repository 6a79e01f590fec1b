"""A lease on etcd: keys that vanish soon after their owner does, and an owner who knows when they have."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from recycle.errors import RunError
from recycle.exec.membership.etcd_client import EtcdClient


class Lease:
    """A lease that a thread keeps alive, three times per term.

    Args:
        client: of its own.
        seconds: the term; etcd grants no shorter one than about two seconds.
        lost: called from the thread, once, when the lease has ended or could not be renewed for a whole term.
    """

    def __init__(self, client: EtcdClient, seconds: int, lost: Callable[[], None]) -> None:
        self._client, self._seconds, self._lost = client, seconds, lost
        self.id = str(client.call("/lease/grant", {"TTL": seconds})["ID"])
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        kept = time.monotonic()
        while not self._closing.wait(self._seconds / 3):
            asked = time.monotonic()
            with contextlib.suppress(RunError):
                answer = self._client.call("/lease/keepalive", {"ID": self.id}, patience=self._seconds / 3)
                if int(answer.get("result", {}).get("TTL", 0)) <= 0:
                    break
                kept = asked
            if time.monotonic() - kept > self._seconds:
                break
        if not self._closing.is_set():
            self._lost()

    def close(self) -> None:
        """Give the lease back: its keys vanish at once."""
        self._closing.set()
        self._thread.join()
        with contextlib.suppress(RunError):
            self._client.call("/lease/revoke", {"ID": self.id}, patience=1.0)
