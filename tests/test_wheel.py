"""The package as others install it: a wheel, without the repository around it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.soak


def test_a_wheel_holds_what_the_commands_need(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        pytest.skip("this environment has no pip")
    source = tmp_path / "source"  # a copy: setuptools leaves a folder "build" beside what it builds
    files = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "recycle", "viz", "pyproject.toml", "README.md", "LICENSE"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("recycle_pipeline-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"recycle/py.typed", "viz/py.typed", "viz/assets/modules/search.js"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"recycle", "viz", wheel.name.split("-py3")[0] + ".dist-info"}
    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True)
    command = "import sys, recycle; from recycle.cli import main; print(recycle.__file__); main(sys.argv[1:])"
    for arguments in (
        ["schedule", "1f1b", "-P", "2", "-m", "4", "-o", "a.json"],
        ["view", "a.json", "--export", "a.html"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", command, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(str(installed / "recycle"))
    page = (tmp_path / "a.html").read_text()
    assets = sorted((installed / "viz" / "assets").glob("*.js"))
    assert len(assets) == len(list((ROOT / "viz" / "assets").glob("*.js"))) > 20
    assert [asset.name for asset in assets if asset.read_text() not in page] == []
