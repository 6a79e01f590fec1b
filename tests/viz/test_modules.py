"""The viewer's modules in node, as far as they need no page; their tests are in `modules/`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from recycle import Shape, Timeline, simulate
from recycle.ir.families import one_f_one_b
from viz.export import MODULES
from viz.lane_cache import encode
from viz.lanes import LaneTable

NODE, TESTS = shutil.which("node"), Path(__file__).parent / "modules"


@pytest.mark.process
@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("tests", sorted(file.name for file in TESTS.glob("*.test.mjs")))
def test_modules(tests: str, tmp_path: Path, broken_timeline: Timeline) -> None:
    (tmp_path / "broken.bin").write_bytes(encode(LaneTable.from_timeline(broken_timeline)))
    whole = LaneTable.from_timeline(simulate(one_f_one_b(broken_timeline.schedule.shape)))
    (tmp_path / "whole.bin").write_bytes(encode(whole))
    many = LaneTable.from_timeline(simulate(one_f_one_b(Shape(pipelines=16, ranks=4, micro_batches=16))))
    (tmp_path / "many.bin").write_bytes(encode(many))
    environment = {"LANES": str(tmp_path), "MODULES": MODULES.as_uri(), "PATH": ""}
    command = [str(NODE), "--test", "--import", str(TESTS / "page.mjs"), str(TESTS / tests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
