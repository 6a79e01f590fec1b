"""Waits while agents run, and takes the place of a lost node.

Arguments: JOB --run RUN, then options as for the agents of the run, without a node.

A node is lost when all its workers have been dead for `PATIENCE` seconds, in which its own agent can be started again.
The spare runs an agent with the number of that node, whose workers copy their state from peers. Several spares may
wait; if two take one node, the leader refuses the second, which waits on.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from recycle import Job, RecycleError, Worker
from recycle.job.shape import place_workers
from recycle.runs.read_report import RunReader

PATIENCE = float(os.environ.get("RECYCLE_SPARE_PATIENCE", "60"))
"""Seconds that a node's workers are dead before a spare takes its place."""
POLL_SECONDS = 5.0
TAKEN = 2
"""Exit code of an agent for a node that has one."""


def lost_nodes(reader: RunReader) -> tuple[set[int], bool]:
    """The numbers of the nodes without a live worker, and whether the run has ended."""
    try:
        record = reader.read()
    except RecycleError:
        return set(), False  # the run has not started
    generations = [event for event in record.events if event["kind"] == "generation"]
    live = {Worker.parse(name) for name in generations[-1]["live"]} if generations else set(record.job.shape.workers())
    nodes = place_workers(record.job.shape, record.job.cluster.workers_per_node)
    has_ended = any(event["kind"] in ("finished", "stopped") for event in record.events[-2:])
    return {number for number, workers in enumerate(nodes) if live.isdisjoint(workers)}, has_ended


def main(job: str, run: str, options: list[str]) -> int:
    Job.load(job)  # a job that cannot be read is refused at once
    reader, since = RunReader(run), dict[int, float]()
    while True:
        lost, has_ended = lost_nodes(reader)
        if has_ended:
            return 0
        since = {node: since.get(node, time.monotonic()) for node in lost}
        overdue = [node for node, begin in since.items() if time.monotonic() - begin >= PATIENCE]
        if overdue:
            node = random.choice(overdue)
            print(f"spare: takes the place of node {node}", flush=True)
            agent = [sys.executable, "-m", "recycle", "agent", job, "--run", run, "--node", str(node), *options]
            code = subprocess.call(agent)
            if code != TAKEN:
                return code
            del since[node]
        time.sleep(POLL_SECONDS * (0.5 + random.random()))


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[2] != "--run" or not Path(sys.argv[1]).is_file():
        sys.exit("spare.py: write: spare.py JOB --run RUN, then options as for the agents of the run")
    try:
        sys.exit(main(sys.argv[1], sys.argv[3], sys.argv[4:]))
    except RecycleError as error:
        print(f"spare.py: {error}", file=sys.stderr)
        sys.exit(2)
