"""The list of runs: what every run wrote, the newest first, and the pages of those that are open."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.viz.components import of_type, plain, words
from viz.app import build_app
from viz.pages.page import Workspace
from viz.pages.registry import open_pages
from viz.pages.runs_page import HEAD, RunsPage, summary
from viz.run_files import load_run, runs_in


@pytest.fixture
def folder(tmp_path: Path, make_run: Callable[..., Path]) -> Path:
    for place, (name, live) in enumerate((("old", False), ("new", True))):
        run = make_run(tmp_path / "runs" / name, live=live)
        os.utime(run, (1e9 + place, 1e9 + place))
    (tmp_path / "runs" / "latest").symlink_to("new")
    return tmp_path / "runs"


def test_the_newest_comes_first_and_links_are_left_out(folder: Path) -> None:
    assert [path.name for path in runs_in(folder)] == ["new", "old"]


def test_a_line_holds_the_figures_of_its_run(folder: Path) -> None:
    moment, steps, loss, seconds, speed, alive, failures = summary(folder / "new")
    assert str(moment).endswith(", not finished")
    assert (steps, speed, alive, failures) == (9, "1,000", 6, 1)
    assert float(str(loss)) == pytest.approx(5.5 * 2.718281828 ** (-8 / 20), rel=1e-4)
    assert float(str(seconds)) > 0
    (folder / "old" / "metrics.jsonl").write_text("{")
    assert summary(folder / "old")[1:3] == [0, None]


def test_runs_that_are_open_have_a_button_and_others_their_command(folder: Path) -> None:
    workspace = Workspace.of([load_run(folder / "new")], run_folders=[folder])
    pages = open_pages(workspace)
    assert [page.title for page in pages][:2] == ["Runs", "new"]
    assert isinstance(pages[0], RunsPage)
    component = plain(pages[0].layout())
    texts = words(component)
    assert texts[:2] == [f"Runs in {folder}", "The newest first."]
    assert texts[2 : 2 + len(HEAD) - 1] == list(HEAD[:-1])
    (button,) = of_type(component, "Button")
    assert button["id"]["page"] == "run0"
    assert f"recycle view {folder / 'old'}" in texts


def test_the_application_begins_with_the_list(folder: Path) -> None:
    app = build_app([load_run(folder / "new")], run_folders=[folder])
    layout = app.server.test_client().get("/_dash-layout").get_json()
    assert [tab["label"] for tab in of_type(layout, "Tab")][:3] == ["Runs", "new", "Time of new"]
