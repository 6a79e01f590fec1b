"""Three nodes on one machine as a user tries them: power and a cable are lost, the losses stay the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recycle import Job
from tests.exec.etcd_server import ETCD
from tests.exec.network import Network

pytestmark = [pytest.mark.process, pytest.mark.etcd]

STEPS = 400
"""More than the script would take: on a busy machine agents take a minute to start."""
FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


@pytest.fixture
def recycle(tmp_path: Path) -> Path:
    """The command, whatever environment the tests run in; nodes can be made here."""
    if ETCD is None:
        pytest.skip("no etcd: install Debian's etcd-server")
    try:
        Network(1).end()
    except PermissionError as refusal:
        pytest.skip(f"no networks of nodes on this machine: {refusal}")
    command = tmp_path / "recycle"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'from recycle.cli import main; main()' \"$@\"\n")
    command.chmod(0o755)
    return command


@pytest.mark.soak
def test_nodes_lose_power_and_a_cable_and_come_back(recycle: Path, tmp_path: Path) -> None:
    environment = {
        "STEPS": f"{STEPS}",
        "RECYCLE": str(recycle),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(FOLDER.parents[1]),
    }
    script = subprocess.Popen(
        [FOLDER / "try_here.sh"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, complaints = script.communicate(timeout=900)
    finally:
        script.terminate()  # it cleans up
        script.wait()
    assert script.returncode == 0, output + complaints
    said = re.findall(r"^\S+ step \d+: (.+)$", output, flags=re.MULTILINE)
    assert said == [
        "node 1 loses power",
        "the others go on without its workers",
        "node 1 is switched on again",
        "its workers have joined again",
        "node 2 is cut off",
        "the others go on without its workers",
        "node 2 has its cable back",
        "its workers have joined again",
    ]
    assert output.splitlines()[-1] == f"{STEPS} losses, identical to the last bit: yes"
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"recycle\d+node", left)


def test_the_jobs_of_the_examples_can_be_read() -> None:
    for path in FOLDER.glob("*.toml"):
        Job.load(path).profile()


def test_a_node_without_root_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([FOLDER / "try_here.sh"], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "try_here.sh: network namespaces need root; run it with sudo\n"
