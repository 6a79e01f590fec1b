"""A transport from outside the package: this file alone, named in the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from tests.exec.runs import Run, job, kinds

pytestmark = pytest.mark.process


class Counting(Gloo):
    """Gloo that says in the worker's log what was asked of it."""

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        print(f"opened {groups.name} with {len(groups.members)}", flush=True)
        return super().open(groups)

    def end(self) -> None:
        super().end()
        print("ended", flush=True)


def test_a_job_trains_through_a_kill_on_a_transport_of_ones_own(launch: Run, tmp_path: Path) -> None:
    of = job(2, 2, 2, membership={"transport": f"{__name__}:Counting"})
    run = launch(of, 5, "kill:1.1@2", directory=tmp_path)
    assert run.losses == launch(job(2, 2, 2), 5).losses
    assert "detected" in kinds(run)
    said = (tmp_path / "logs" / "0.0.log").read_text().splitlines()
    opened = [line.split()[-1] for line in said if line.startswith("opened")]
    assert opened == ["4", "3"]
    assert said.count("ended") == 2
