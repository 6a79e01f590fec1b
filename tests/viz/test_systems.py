"""A comparison of systems from the command's file to its page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from recycle import RecycleError
from recycle.cli import main
from tests.cli.command import Command
from tests.viz.components import of_type, plain, words
from viz.app import build_app
from viz.figures.charts import rate_steps
from viz.pages.page import Workspace
from viz.pages.systems_page import SystemsPage
from viz.sources import RateChange, SystemComparison, SystemResult, is_comparison, load_comparison

JOB = "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 3\n[memory]\nlimit = 3\n"


TRACE = "3600000,remove,n1\n7200000,add,n1\n9000000,remove,n2\n86400000,add,n2\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `recycle compare --save` writes of all systems on two traces; Bamboo does not fit."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "job.toml").write_text(JOB)
    for name in ("one", "two"):
        (folder / f"{name}.csv").write_text(TRACE)
    options = ("--trace", folder / "one.csv", "--trace", folder / "two.csv", "--save", folder / "saved")
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, (folder / "job.toml", *options))])
    assert not ended.value.code
    return folder / "saved" / "comparison.json"


@pytest.fixture(scope="module")
def comparison(file: Path) -> SystemComparison:
    return load_comparison(file)


def test_a_comparison_is_recognised_by_its_first_bytes(file: Path, tmp_path: Path) -> None:
    assert is_comparison(file)
    other = tmp_path / "schedule.json"
    other.write_text('{"format": "recycle-schedule"}')
    assert not is_comparison(other)
    assert not is_comparison(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert not is_comparison(tmp_path / "pipe")  # without a writer a reader would wait forever
    assert not is_comparison(tmp_path / "none")


def test_only_visible_pauses_are_drawn() -> None:
    def system(pause: float) -> SystemResult:
        changes = [
            RateChange(0.0, "start", 0.0, 5.0),
            RateChange(36000.0, "stop", pause, 4.0),
            RateChange(43200.0, "join", 0.0, 5.0),
        ]
        return SystemResult("x", "y", True, 4.0, 5.0, 72000.0, {}, changes)

    assert rate_steps(system(3600.0)) == ([0, 10, 11, 12, 20], [5, 0, 4, 5, 5])
    assert rate_steps(system(36.0)) == ([0, 10, 12, 20], [5, 4, 5, 5])
    assert rate_steps(system(1e9)) == ([0, 10, 12, 20], [5, 0, 5, 5])


def test_the_page_shows_the_chosen_trace(comparison: SystemComparison) -> None:
    page = SystemsPage(Workspace(comparisons={"comparison.json": comparison}))
    first = plain(page.layout())
    (choice,) = of_type(first, "Dropdown")
    assert [option["label"] for option in choice["options"]] == ["one.csv (2 failures)", "two.csv (2 failures)"]
    texts = words(plain(page.content(1)))
    assert "Goodput: two.csv" in texts
    assert "does not fit" in texts
    assert any(text.startswith("bamboo: ") and "micro-batches" in text for text in texts)
    client: Any = build_app([], comparisons={"comparison.json": comparison}).server.test_client()
    assert "Goodput: one.csv" in client.get("/_dash-layout").get_data(as_text=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda comparison: comparison.pop("traces"), "is not a complete comparison"),
        (lambda comparison: comparison["systems"].pop(), "results of some systems are missing"),
        (lambda comparison: comparison["systems"][0].update(goodput="much"), "$.systems[0].goodput"),
    ],
)
def test_a_broken_comparison_is_refused_in_one_line(
    file: Path, tmp_path: Path, change: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = json.loads(file.read_text())
    change(comparison)
    broken = tmp_path / "comparison.json"
    broken.write_text(json.dumps(comparison))
    with pytest.raises(RecycleError, match=r"comparison\.json") as refused:
        load_comparison(broken)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert Command(capsys)("view", broken, "--port", "0").refused("comparison.json", message)


def test_a_comparison_is_exported_as_one_page(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["view", str(file), "--export", str(tmp_path / "compared.html")])
    assert not ended.value.code
    page = (tmp_path / "compared.html").read_text(encoding="utf-8")
    assert [page.count(f"Goodput: {name}") for name in ("one", "two")] == [1, 1]
    assert page.count("Plotly.newPlot(") == 6
    assert "does not fit" in page
