"""An export is whole: it opens without a server, a network, or a script from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recycle import RecycleError, Schedule, Shape
from viz.export import SVG_LIMIT, export
from viz.figures import palette
from viz.figures.svg import height_of
from viz.sources import load_source

PLOTLY = re.compile(r"<script>/\*\*.*?</script>", re.DOTALL)


def outside_references(page: str) -> list[str]:
    """Everything a browser would fetch: sources, links, style imports and addresses outside of plotly.js itself."""
    loads = re.findall(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)\s*=", page)
    without_library = PLOTLY.sub("", page)
    addresses = re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+|@import|url\(", without_library)
    return loads + addresses


def test_a_run_is_one_page_with_all_its_figures(run_dir: Path, tmp_path: Path) -> None:
    export(tmp_path / "run.html", [load_source(run_dir)])
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert outside_references(page) == []
    assert page.count("Plotly.newPlot(") == 3  # one in the library itself; lanes have axes of their own
    headings = re.findall(r"<h3[^>]*>([^<]+)</h3>", page)
    assert headings == [
        f"{title}, step {step}: {what}"
        for title, step in (("Before the failure", 2), ("During the failure", 4), ("After the return", 7))
        for what in ("planned", "executed")
    ]
    assert page.count('<div class="lanes-minimap">') == len(headings)  # none is hidden
    assert '"showSendToCloud": false' in page
    assert '"showSendToCloud": true' not in page
    assert "without 1.1" in page


def test_the_page_holds_plotly_once(run_dir: Path, schedule_file: Path, tmp_path: Path) -> None:
    export(tmp_path / "both.html", [load_source(run_dir), load_source(schedule_file)])
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert len(PLOTLY.findall(page)) == 1
    assert len(page) < 6_000_000
    assert outside_references(page) == []


def test_a_schedule_is_a_page_with_its_figures(schedule_file: Path, tmp_path: Path) -> None:
    export(tmp_path / "plan.html", [load_source(schedule_file)])
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert outside_references(page) == []
    assert len(page) < 200_000  # lanes need no plotly.js
    assert '<th scope="row">makespan</th><td>11</td>' in page
    assert '<th scope="row">lower bound</th><td>10</td>' in page


def test_a_name_cannot_become_markup(tmp_path: Path, broken: Schedule) -> None:
    broken.save(tmp_path / "a<b>&c.json")
    export(tmp_path / "out.html", [load_source(tmp_path / "a<b>&c.json")])
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "a&lt;b&gt;&amp;c.json" in page
    assert "a<b>" not in PLOTLY.sub("", page)


def test_svg_of_a_run_has_its_moments_on_one_axis_per_unit(run_dir: Path, tmp_path: Path) -> None:
    export(tmp_path / "run.svg", [load_source(run_dir)])
    text = (tmp_path / "run.svg").read_text(encoding="utf-8")
    assert text.count('font-size="13"') == 6
    assert text.count(">failed</text>") == 2
    export(tmp_path / "again.svg", [load_source(run_dir)])
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "run.svg").read_bytes()


def test_a_run_without_iterations_exports_a_page_but_no_svg(run_dir: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "trace.json"):
        (run_dir / name).unlink()
    for log in (run_dir / "logs").iterdir():
        log.unlink()
    source = load_source(run_dir)
    assert source.panels() == []
    export(tmp_path / "run.html", [source])
    assert "No iteration ran yet." in (tmp_path / "run.html").read_text(encoding="utf-8")
    with pytest.raises(RecycleError, match="nothing to draw"):
        export(tmp_path / "run.svg", [source])


def test_what_cannot_be_exported_is_refused(schedule_file: Path, tmp_path: Path) -> None:
    from recycle.ir.families import gpipe

    source = load_source(schedule_file)
    with pytest.raises(RecycleError, match=r"export knows \.html, \.svg, \.png, not \.pdf"):
        export(tmp_path / "plan.pdf", [source])
    with pytest.raises(RecycleError, match="cannot be written"):
        export(tmp_path / "absent" / "plan.svg", [source])
    gpipe(Shape(pipelines=16, ranks=8, micro_batches=80)).save(tmp_path / "large.json")
    with pytest.raises(RecycleError, match=f"too many for an SVG .at most {SVG_LIMIT}"):
        export(tmp_path / "large.svg", [load_source(tmp_path / "large.json")])


@pytest.mark.slow
def test_a_png_shows_any_number_of_operations(tmp_path: Path, schedule_file: Path) -> None:
    from recycle.ir.families import gpipe
    from tests.viz.test_raster import colours

    export(tmp_path / "plan.png", [load_source(schedule_file)])
    small = colours((tmp_path / "plan.png").read_bytes())
    height, width = small.shape
    left, top = round(22 + 3 * 6.6), 34
    assert height == round(height_of([6 * 30]))
    assert small[0, 0] == palette.PAPER
    assert small[top + 7, left + 70] == palette.FORWARD.fill  # at the edge of a box, beside its label
    names = small[top : top + 6 * 30, : left - 4]
    assert [bool((names[30 * lane : 30 * lane + 30] != palette.PAPER).any()) for lane in range(6)] == [True] * 6
    assert (small[top - 9, left : width - 16] == palette.INK).mean() > 0.9  # the period is that of the whole axis
    gpipe(Shape(pipelines=64, ranks=8, micro_batches=40)).save(tmp_path / "large.json")
    export(tmp_path / "large.png", [load_source(tmp_path / "large.json")])
    large = colours((tmp_path / "large.png").read_bytes())
    assert large.shape[0] == round(height_of([1200]))
    assert {paint.fill for paint in palette.PAINTS[:3]} <= set(large.ravel())
