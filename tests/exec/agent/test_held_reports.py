"""An agent sends the reports of an iteration in one batch, unless a process of the node is late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from recycle.exec.agent import node_agent
from recycle.exec.agent.node_agent import NodeAgent
from recycle.exec.links import Hub, Link, connect_locally, listen_locally
from recycle.exec.protocol import AgentMessage, Join, Ready, Report, Said, Start, StepReport

REPORT = Said(StepReport(0, Report({0: [1.0]}, None)), 1)


class Node:
    """An agent with two processes."""

    def __init__(self) -> None:
        self.hub = Hub()
        listener, self._address = listen_locally()
        processes = Mock(gone=dict, running=lambda worker: False)
        self.agent = NodeAgent(0, "session", self.hub, 0.25, 1, listener, processes)
        for name in ("0.0", "0.1"):
            self.agent.obey(Start(name, 0, name, 0))
        self.links = [self._join(name) for name in ("0.0", "0.1")]

    def _join(self, name: str) -> Link:
        link = connect_locally(self._address, AgentMessage, "the agent")
        link.send(Join(name, 0))
        return link

    def batch(self) -> list[str] | None:
        """The processes whose messages the next batch has."""
        while self.hub.dispatch(0.01):
            pass
        batch = self.agent.batch(hold=True)
        return None if batch is None else [said.member for said in batch.said]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(node_agent, "HOLD_SECONDS", 5.0)
    node = Node()
    yield node
    node.hub.close()
    for link in node.links:
        link.close()


def test_reports_wait_for_those_of_the_other_processes(node: Node) -> None:
    node.links[0].send(REPORT)
    assert node.batch() is None
    assert node.agent.is_holding
    node.links[1].send(REPORT)
    assert node.batch() == ["0.0", "0.1"]
    assert not node.agent.is_holding


def test_reports_do_not_wait_for_a_late_process(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "HOLD_SECONDS", 0.05)
    node.links[0].send(REPORT)
    assert node.batch() is None
    time.sleep(0.05)
    assert node.batch() == ["0.0"]


def test_other_messages_do_not_wait(node: Node) -> None:
    node.links[0].send(REPORT)
    node.links[1].send(Said(Ready(0)))
    assert node.batch() == ["0.0", "0.1"]
