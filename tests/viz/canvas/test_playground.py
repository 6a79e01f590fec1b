"""The playground of the static site draws dropped timelines as the viewer does, and says what it cannot draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recycle import Profile, Schedule, Shape, simulate
from recycle.ir.families import zb_v
from recycle.ir.formats import chrome_trace
from tests.test_site import site
from viz.export import export
from viz.lanes import LaneTable
from viz.sources import load_source

__all__ = ["site"]
pytestmark = pytest.mark.browser
VIEW = "[...recycle.views.values()].find((view) => view.root.closest('.dropped'))"


@pytest.fixture(scope="module")
def address(site: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("site") / "playground.html"
    path.write_text(site.playground())
    return path.as_uri()


@pytest.fixture
def drop(chromium: Any, address: str, tmp_path: Path) -> Iterator[Callable[[str, str], Any]]:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.wait_for_selector(".lanes-view[data-drawn]")

    def take(name: str, content: str) -> Any:
        (tmp_path / name).write_text(content)
        page.set_input_files(".playground input", tmp_path / name)
        page.wait_for_function(
            "() => !/^(Reading.*|)$/.test(document.querySelector('.playground [role=status]').textContent)"
        )
        return page

    yield take
    page.close()
    assert complaints == []


@pytest.mark.parametrize("case", ["without 1.1", "chunks"])
def test_a_trace_is_drawn_as_the_viewer_draws_its_schedule(
    drop: Callable[[str, str], Any], broken: Schedule, case: str
) -> None:
    schedule = broken if case == "without 1.1" else zb_v(Shape(2, 3, 4, chunks=2))
    profile = Profile.uniform(link=0.25)
    page = drop("timeline.json", "".join(chrome_trace.dumps(schedule, profile)))
    page.wait_for_selector(".dropped .lanes-view[data-drawn]")
    table = LaneTable.from_timeline(simulate(schedule, profile))
    found = page.evaluate(f"""() => {{ const {{ table }} = {VIEW}, all = [...table.kind.keys()];
      return [[...table.offsets], [...table.start], [...table.end], all.map((i) => table.instruction(i)),
        all.map((i) => table.has(i, "REROUTED")), table.labels, table.failed, table.span]; }}""")
    tokens = [str(table.instruction(i)).split("@")[0] for i in range(len(table))]
    assert found[0] == table.offsets.tolist()
    assert found[1] == pytest.approx(table.start.tolist())
    assert found[2] == pytest.approx(table.end.tolist())
    assert found[3] == tokens
    assert found[4] == [bool(flags & 1) for flags in table.flags]
    assert found[5] == [str(worker) for worker in schedule.shape.workers()]
    assert found[6] == table.failed.nonzero()[0].tolist()
    assert found[7] == pytest.approx(table.span)
    assert f"{len(table)} operations on" in page.inner_text(".playground [role=status]")


def test_a_run_and_an_exported_page_are_drawn_and_the_latest_takes_the_place(
    drop: Callable[[str, str], Any], run_dir: Path, schedule_file: Path, tmp_path: Path
) -> None:
    page = drop("trace.json", (run_dir / "trace.json").read_text())
    page.wait_for_selector(".dropped .lanes-view[data-drawn]")
    assert page.evaluate(f"() => {VIEW}.table.unit[1]") in ("s", "ms")
    export(tmp_path / "plan.html", [load_source(schedule_file)])
    page = drop("plan.html", (tmp_path / "plan.html").read_text())
    page.wait_for_function(f"() => {VIEW}?.drawn && {VIEW}.table.span === 11")
    assert page.locator(".dropped").count() == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.json", "{", "x.json cannot be drawn: neither JSON nor a page"),
        ("x.json", '{"traceEvents": []}', "x.json cannot be drawn: no timeline of recycle"),
        ("x.json", '{"programs": {}}', "a schedule has no times yet: recycle convert FILE timeline.json"),
        (
            "x.json",
            '{"otherData": {"shape": {"pipelines": 1, "ranks": 1}}, "traceEvents": [{"ph": "X", "ts": 0}]}',
            "it holds no instruction",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(
    drop: Callable[[str, str], Any], name: str, content: str, said: str
) -> None:
    page = drop(name, content)
    assert said in page.inner_text(".playground [role=status]")
    assert page.locator(".dropped").count() == 0
