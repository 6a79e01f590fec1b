"""The store that process groups form on, as torch's backends see it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

PAUSE_SECONDS = (0.001, 0.05)
"""How often a group that forms looks for its members: at first, and after a while."""


class FormingStore(Store):
    """Keys that a process's groups form on, with waits that end when the generation is over.

    torch's own clients block in `get` until the value is there, with the client's lock held: a process whose peer has
    died before it came would neither leave its generation nor reach its agent. Opening such a client looks its address
    up in the DNS with the interpreter lock held, which took 5 s where no name server answered. Backends accept this
    store below a PrefixStore, whether the keys are the agent's or torchrun's; that does not keep it alive.

    Args:
        client: `set`, `get` and `check` of it are used.
        over: set when the generation is over; waits then raise RuntimeError.
        seconds: after which a `get` of what is not there raises RuntimeError.
    """

    def __init__(self, client: Any, over: threading.Event, seconds: float = 300.0) -> None:
        super().__init__()
        self._client, self._over, self._seconds = client, over, seconds

    def set(self, key: str, value: str) -> None:
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=self._seconds))
        value: bytes = self._client.get(key)
        return value

    def check(self, keys: list[str]) -> bool:
        return bool(self._client.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        pause, longest = PAUSE_SECONDS
        while not self._client.check(keys):
            if self._over.is_set() or time.monotonic() > deadline:
                raise RuntimeError(f"waited for {keys[0]} in vain")
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
