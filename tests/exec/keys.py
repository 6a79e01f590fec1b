"""Serves the keys that process groups form on, to processes that have no agent."""

import socket
import threading
from typing import Any

from recycle.exec.links import Hub, Link, is_own_user, listen_locally
from recycle.exec.protocol import GetKeys, SetKey, Values

LOOK_SECONDS = 0.2


class KeyServer:
    """Keys in this process's memory, served from a thread until it is closed.

    Attributes:
        address: name of the socket, for `FormingKeys`.
    """

    def __init__(self):
        self._hub, self._keys, self._closing = Hub(), {}, threading.Event()
        listener, self.address = listen_locally()
        self._hub.listen(listener, self._accept)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _accept(self, connection: socket.socket):
        if not is_own_user(connection):
            connection.close()
            return
        link = Link(connection, SetKey | GetKeys)
        link.owner = self._answer
        self._hub.add(link)

    def _answer(self, link: Link, messages: list[Any] | None):
        for message in messages or ():
            if isinstance(message, SetKey):
                self._keys[message.name] = message.value
                self._hub.send(link, Values())
            else:
                self._hub.send(link, Values([self._keys.get(name) for name in message.names]))

    def _serve(self):
        while not self._closing.is_set():
            self._hub.dispatch(LOOK_SECONDS)
        self._hub.close()

    def close(self):
        """End the thread, and close all connections."""
        self._closing.set()
        self._thread.join()
