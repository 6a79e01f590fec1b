"""The notebooks run from top to bottom, as a reader would run them, and show what their text says."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.warm import warm_children

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def run_cells(name: str) -> tuple[dict[str, Any], list[Any]]:
    """The names that are defined in the end, and what the last line of each cell of code gives, if it is a value."""
    names: dict[str, Any] = {}
    shown = []
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "a notebook is kept without its outputs"
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                shown.append(value)
    return names, shown


def test_a_schedule_is_written_checked_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names, shown = run_cells("write_a_schedule")
    printed = capsys.readouterr().out
    assert list(shown[0]) == []
    assert all(value._repr_svg_().startswith("<svg") for value in shown[1:])
    assert "makespan 10.0 period 9.0" in printed
    assert {finding.rule for finding in names["findings"] if finding.severity == "error"} == {"deadlock"}
    assert [row[:2] for row in names["rows"]] == [("gpipe", 33.0), ("1f1b", 33.0), ("zb-h1", 27.0), ("zb-h2", 24.0)]
    assert (tmp_path / "mine.json").is_file()


@pytest.mark.search
def test_failures_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    names, shown = run_cells("plan_for_failures")
    printed = capsys.readouterr().out.splitlines()
    assert names["healthy"].period < 27
    assert (names["adaptive"].period, names["adaptive"].gap) == (27, 0)
    assert [line for line in printed if line.startswith("at most")] == [
        "at most 4 activations: period 29, gap 0.0%",
        "at most 5 activations: period 28, gap 0.0%",
        "at most 6 activations: period 27, gap 0.0%",
        "at most 8 activations: period 27, gap 0.0%",
    ]
    assert shown[-1]._repr_svg_().count("rerouted") > 0


@pytest.mark.process
def test_training_goes_through_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with warm_children():
        names, shown = run_cells("train_through_one")
    assert names["struck"].losses == names["calm"].losses
    assert "worker 1.1 re-joined at step 8" in capsys.readouterr().out
    assert "failed" in shown[-1]._repr_svg_()
