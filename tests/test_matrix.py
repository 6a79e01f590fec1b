"""`make matrix` finds the environments, counts the tests of each part, and fails if anything failed."""

import shutil
import sys
from pathlib import Path

import pytest

from tests import matrix

pytestmark = pytest.mark.process

INTERPRETER = """#!/bin/sh
copy=${PYTHONPATH##*:}
if [ "$1" = -c ]; then
    echo "[\\"3.99.0\\", \\"2.99\\", \\"$(basename "$copy")\\", [$(cat "$copy/loss")], []]"
fi
for argument; do
    case $argument in --junitxml=*) cp "$copy/report" "${argument#--junitxml=}" ;; esac
done
"""
"""Stands in for an interpreter whose runs and tests have these results."""


def write_environment(folder: Path, loss: float, version: str, results: dict[str, str]):
    python, copy = folder / "3.99" / "bin" / "python", folder / "3.99" / "megatron-core" / version
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(INTERPRETER)
    python.chmod(0o755)
    copy.mkdir(parents=True)
    cases = []
    for part, result in results.items():
        file, _, name = matrix.PARTS[part][0].replace(".py", "").replace("/", ".").partition("::")
        cases.append(f'<testcase classname="{file}" name="{name or "test"}[0]">{result}</testcase>')
    (copy / "report").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    (copy / "loss").write_text(str(loss))


@pytest.mark.parametrize(
    ("loss", "changes", "status", "cell"),
    [
        (1.5, {}, 0, "1"),
        (2.5, {}, 1, "1"),
        (1.5, {"kill": "<failure/>"}, 1, "1 failed"),
        (1.5, {"kill": "<error/>"}, 1, "1 failed"),
        (1.5, {"kill": "<skipped/>"}, 1, "none ran"),
    ],
)
def test_exit_status_is_1_if_a_test_failed_or_a_loss_differs(
    loss, changes, status, cell, tmp_path, monkeypatch, capsys
):
    results = dict.fromkeys(matrix.PARTS, "")
    write_environment(tmp_path, 1.5, "0.9.1", results)
    write_environment(tmp_path, loss, "0.10.1", results | changes)
    monkeypatch.setattr(sys, "argv", ["matrix", "--folder", str(tmp_path), "--others"])
    assert matrix.main() == status
    head, first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split() == ["3.99.0", "2.99", "0.9.1", "ok", *["1"] * len(matrix.PARTS)]
    assert second.startswith("3.99.0  2.99   0.10.1")
    assert second[head.index("kill") :].startswith(cell)


def test_nothing_is_tested_without_environments(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["matrix", "--folder", str(tmp_path), "--others"])
    assert matrix.main() == 0
    assert list(tmp_path.iterdir()) == []


def test_names_and_calls_that_a_version_lacks_are_found(tmp_path, monkeypatch):
    used, copy = tmp_path / "recycle", tmp_path / "copy" / "megatron" / "core"
    for folder in (used, copy, tmp_path / "tests"):
        folder.mkdir(parents=True)
    shutil.copy(matrix.ROOT / "tests" / "types.ini", tmp_path / "tests")
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    (copy / "__init__.py").write_text("def kept(a): ...\n")
    (used / "__init__.py").write_text("from megatron.core import gone, kept\nkept(1)\nkept()\n")
    found = matrix.misfits(matrix.Environment("new", Path(sys.executable), tmp_path / "copy"), tmp_path)
    assert sorted(found) == [
        'recycle/__init__.py:1: error: Module "megatron.core" has no attribute "gone"',
        'recycle/__init__.py:3: error: Missing positional argument "a" in call to "kept"',
    ]
