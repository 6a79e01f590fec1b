"""The lanes that pages show, by content: what `lanes/<hash>.bin`, its PNG and the details are made from."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from recycle.ir.simulate import Timeline
from viz.lanes import LaneTable
from viz.wire import encode

MOST_BYTES = 400_000_000
"""What the shelf may hold; the tables used last stay, and at least one."""


@dataclass(frozen=True, eq=False)
class Shown:
    """A table on the shelf; `timeline` where it was planned, which knows what waited for what."""

    table: LaneTable
    content: bytes
    timeline: Timeline | None


class Shelf:
    """Tables by the hash of their `lanes.bin`. Safe to use from several threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._shown: OrderedDict[str, Shown] = OrderedDict()
        self._digests: WeakKeyDictionary[LaneTable, str] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def put(self, table: LaneTable, timeline: Timeline | None = None) -> str:
        """Keep a table (lanes by pipeline, then rank) and return its hash."""
        known = self._digests.get(table)
        if known is not None and self.get(known) is not None:
            return known
        content = encode(table)
        digest = hashlib.sha256(content).hexdigest()[:32]
        with self._lock:
            self._digests[table] = digest
            self._shown[digest] = Shown(table, content, timeline)
            self._shown.move_to_end(digest)
            while len(self._shown) > 1 and sum(len(shown.content) for shown in self._shown.values()) > self.most_bytes:
                self._shown.popitem(last=False)
        return digest

    def get(self, digest: str) -> Shown | None:
        """The table of that hash; None when it was never there, or others took its place."""
        with self._lock:
            if digest in self._shown:
                self._shown.move_to_end(digest)
            return self._shown.get(digest)
