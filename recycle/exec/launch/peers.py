"""The agents of other nodes, as the leader reaches them."""

from __future__ import annotations

import socket
import time
from functools import partial
from typing import Any

from recycle.exec.launch.runtime import LeaderRuntime, Peer
from recycle.exec.links import HANDSHAKE_SECONDS, Hub, Link
from recycle.exec.protocol import Batch, Drain, Hello, Order

FromAgent = Hello | Batch | Drain
"""Messages on a connection to the leader."""


class AgentServer:
    """Accepts the agents of other nodes, and passes their messages to the leader's runtime."""

    def __init__(self, runtime: LeaderRuntime, hub: Hub, listener: socket.socket, key: bytes) -> None:
        self.runtime, self._hub, self._key = runtime, hub, key
        self._peers: dict[Link, tuple[int, Peer]] = {}
        self._sessions: dict[str, Link] = {}
        self._links = dict[Link, None]()  # in order
        self._strangers = dict[Link, float]()
        self._listener = listener
        hub.listen(listener, self._accept)

    def _accept(self, connection: socket.socket) -> None:
        link = Link(connection, FromAgent, self._key, is_server=True)
        link.owner = self._take
        self._links[link] = None
        self._strangers[link] = time.monotonic() + HANDSHAKE_SECONDS
        self._hub.add(link)

    def close_strangers(self) -> None:
        """Close connections that did not authenticate with the run's key in time."""
        now = time.monotonic()
        for link, deadline in list(self._strangers.items()):
            if link.is_trusted or now > deadline:
                del self._strangers[link]
                if not link.is_trusted:
                    self._links.pop(link, None)
                    self._hub.remove(link)

    def _take(self, link: Link, messages: list[Any] | None) -> None:
        if messages is None:
            self._links.pop(link, None)
            self._disconnect(link)
        for message in messages or ():
            match message:
                case Hello():
                    self._disconnect(self._sessions.get(message.session))  # the agent has noticed the break first
                    peer = partial(self._send, link)
                    if self.runtime.connect_agent(peer, message):
                        self._peers[link] = message.node, peer
                        self._sessions[message.session] = link
                case Batch() if link in self._peers:
                    self.runtime.take(self._peers[link][0], message)
                case Drain():
                    self.runtime.drain(message, partial(self._hub.send, link))

    def _send(self, link: Link, order: Order, body: bytes | None = None) -> None:
        self._hub.send(link, body or order)

    def _disconnect(self, link: Link | None) -> None:
        if link in self._peers:
            self.runtime.disconnect_agent(*self._peers.pop(link))

    @property
    def is_empty(self) -> bool:
        return not self._peers

    def close(self) -> None:
        self._hub.remove(self._listener)
        for link in self._links:
            self._hub.remove(link)
        self.runtime.close()
