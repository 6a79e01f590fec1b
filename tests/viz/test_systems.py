"""A comparison of systems from the command's file to its page: what stands there is what was computed."""

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
from viz.figures.charts import lost_figure, rates_figure, steps
from viz.pages.systems_page import SystemsPage
from viz.sources import RateChange, SystemComparison, SystemResult, is_comparison, load_comparison

JOB = "[shape]\npipelines = 3\nranks = 4\nmicro_batches = 6\n[memory]\nlimit = 6\n"


TRACE = "3600000,remove,n1\n7200000,add,n1\n9000000,remove,n2\n86400000,add,n2\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `recycle compare --save` writes of all systems on two traces; Bamboo does not fit."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "job.toml").write_text(JOB)
    for name in ("one", "two"):
        (folder / f"{name}.csv").write_text(TRACE)
    of = ("--trace", folder / "one.csv", "--trace", folder / "two.csv", "--save", folder / "saved")
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, (folder / "job.toml", *of))])
    assert not ended.value.code
    return folder / "saved" / "comparison.json"


@pytest.fixture(scope="module")
def comparison(file: Path) -> SystemComparison:
    return load_comparison(file)


def test_a_comparison_is_known_by_its_first_words(file: Path, tmp_path: Path) -> None:
    assert is_comparison(file)
    other = tmp_path / "schedule.json"
    other.write_text('{"format": "recycle-schedule"}')
    assert not is_comparison(other)
    assert not is_comparison(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert not is_comparison(tmp_path / "pipe")  # nobody writes to it, so a reader would wait for ever
    assert not is_comparison(tmp_path / "none")


def test_shares_of_time_are_those_that_were_booked(comparison: SystemComparison) -> None:
    systems = [system for system in comparison.of(0) if system.fits]
    assert len(systems) == len(comparison.of(0)) - 1
    shown: dict[str, float] = dict.fromkeys((system.name for system in systems), 0.0)
    for bars in lost_figure(systems).data:
        for name, share in zip(bars.y, bars.x, strict=True):
            shown[name] += share
    for system in systems:
        assert shown[system.name] == pytest.approx(100 * (1 - system.goodput / system.fault_free), abs=0.05)


def test_rates_stand_above_the_nodes_alive(comparison: SystemComparison) -> None:
    trace = comparison.traces[0]
    *lines, alive = rates_figure(trace, comparison.of(0)).data
    assert [line.name for line in lines] == [system.name for system in comparison.of(0) if system.fits]
    assert list(alive.x) == pytest.approx([0, 1, 2, 2.5, 24, 24])
    assert list(alive.y) == [12, 11, 12, 11, 12, 12]
    for line, system in zip(lines, (one for one in comparison.of(0) if one.fits), strict=True):
        assert line.y[0] == pytest.approx(system.timeline[0].rate)


def test_pauses_are_drawn_when_they_are_long_enough_to_be_seen() -> None:
    def system(pause: float) -> SystemResult:
        changes = [
            RateChange(0.0, "start", 0.0, 5.0),
            RateChange(36000.0, "stop", pause, 4.0),
            RateChange(43200.0, "join", 0.0, 5.0),
        ]
        return SystemResult("x", "y", True, 4.0, 5.0, 72000.0, {}, changes)

    assert steps(system(3600.0)) == ([0, 10, 11, 12, 20], [5, 0, 4, 5, 5])
    assert steps(system(36.0)) == ([0, 10, 12, 20], [5, 4, 5, 5])
    assert steps(system(1e9)) == ([0, 10, 12, 20], [5, 0, 5, 5])


def test_the_page_shows_one_trace_and_lets_another_be_chosen(comparison: SystemComparison) -> None:
    page = SystemsPage(comparison, "comparison.json", "systems0")
    first = plain(page.layout())
    (choice,) = of_type(first, "Dropdown")
    assert [option["label"] for option in choice["options"]] == ["one.csv (2 failures)", "two.csv (2 failures)"]
    found = words(plain(page.shown(1)))
    assert "Goodput: two.csv" in found
    assert "does not fit" in found
    assert any(text.startswith("bamboo: ") and "micro-batches" in text for text in found)
    client: Any = build_app([], comparisons={"comparison.json": comparison}).server.test_client()
    assert "Goodput: one.csv" in client.get("/_dash-layout").get_data(as_text=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found.pop("traces"), "is no complete comparison"),
        (lambda found: found["systems"].pop(), "some system is missing on some trace"),
        (lambda found: found["systems"][0].update(goodput="much"), "$.systems[0].goodput"),
    ],
)
def test_a_broken_comparison_is_refused_in_one_line(
    file: Path, tmp_path: Path, change: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(file.read_text())
    change(found)
    broken = tmp_path / "comparison.json"
    broken.write_text(json.dumps(found))
    with pytest.raises(RecycleError, match=r"comparison\.json") as refused:
        load_comparison(broken)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert Command(capsys)("view", broken, "--port", "0").refused("comparison.json", says)


def test_a_comparison_is_exported_as_one_page(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["view", str(file), "--export", str(tmp_path / "compared.html")])
    assert not ended.value.code
    page = (tmp_path / "compared.html").read_text(encoding="utf-8")
    assert [page.count(f"Goodput: {name}") for name in ("one", "two")] == [1, 1]
    assert page.count("Plotly.newPlot(") == 6
    assert "does not fit" in page
