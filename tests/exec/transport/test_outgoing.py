"""Lanes of messages that a process sends."""

import subprocess
import sys

import pytest

LANE = """
import threading
from types import SimpleNamespace
import torch
from recycle.exec.transport.outgoing import OutgoingLane
began = threading.Event()
def wait(seconds):
    began.set()
    threading.Event().wait()
over = threading.Event()
lane = OutgoingLane(lambda tensor, tag: SimpleNamespace(wait=wait), lambda network: 0.0, over)
first, second = (lane.send(torch.zeros(1), tag) for tag in range(2))
began.wait()
lane.close()
print(first.is_completed(), second.is_completed())
"""


@pytest.mark.process
def test_process_ends_while_a_message_is_never_delivered():
    """gloo does not end every wait for a delivery with the connection."""
    ended = subprocess.run([sys.executable, "-c", LANE], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "False False\n"
