"""Gloo whose iterations last a while as long as a file is there, so that a run does not end before a test has struck.

What a test waits for (a lease that runs out, a process that starts) takes longer on a busy machine, and the run with it
would have to have more iterations. Instead it goes slowly until the test has seen everything, and then at full speed.
"""

import time
from pathlib import Path

from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport

SLOWLY = Path("slowly")
"""Of the working directory, which workers have from their agent or launcher. May hold the seconds of a pause."""
PAUSE = 0.4
"""Seconds before an iteration where the file is empty; far less than what counts as a hang."""


def pause() -> float:
    """Seconds before an iteration."""
    try:
        return float(SLOWLY.read_text() or PAUSE)
    except FileNotFoundError:
        return 0.0


class Paced(Gloo):
    """For jobs with `[membership] transport = "tests.exec.paced:Paced"`."""

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        transport = super().open(groups)
        begin = transport.begin

        def paced(program, iteration):
            deadline = time.monotonic() + pause()
            while SLOWLY.exists() and time.monotonic() < deadline and not groups.over.is_set():
                groups.over.wait(0.02)
            begin(program, iteration)

        transport.begin = paced
        return transport
