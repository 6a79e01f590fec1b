"""The Promela model of the control plane: spin finds no violation of it, and the defects that are put into it."""

import re
import shutil
import subprocess

import pytest

from tests import ROOT

MODEL = ROOT / "conformance" / "model" / "control_plane.pml"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="spin or gcc is not installed"),
]


@pytest.mark.parametrize(
    ("mutant", "violated"), [(0, ""), (1, "role==a"), (5, "written.live"), (10, "assertion violated outcome")]
)
def test_search_with_one_fault(tmp_path, mutant, violated):
    def call(*command):
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout

    call("spin", "-DFAULTS=1", f"-DMUTANT={mutant}", "-a", str(MODEL))
    call("gcc", "-w", "-DSAFETY", "-DNOCLAIM", "-DCOLLAPSE", "-o", "pan", "pan.c")
    found = call("./pan", "-m10000")
    assert re.findall(r"errors: (\d)", found) == ["1" if violated else "0"]
    assert violated in found
    if not mutant:
        assert int(re.findall(r"(\d+) states, stored", found)[0]) > 100_000
