"""An export is whole: it opens without a server, a network, or a script from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recycle import Profile, RecycleError, Schedule, Shape, Timeline
from recycle.ir.families import one_f_one_b
from viz.export import SVG_LIMIT, export
from viz.figures import palette
from viz.figures.boxes import boxes
from viz.figures.svg import LANE, height_of
from viz.lanes import LaneTable
from viz.sources import load_source, schedule_source

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


def test_a_schedule_is_a_page_with_its_figures(schedule_file: Path, tmp_path: Path) -> None:
    export(tmp_path / "plan.html", [load_source(schedule_file)])
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert outside_references(page) == []
    assert len(page) < 200_000  # lanes need no plotly.js
    assert '<th scope="row">makespan</th><td>11</td>' in page
    assert '<th scope="row">bound</th><td>10 (gap 10 %)</td>' in page


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


def colours(path: Path) -> np.ndarray:
    """The colours of a PNG, hexadecimal."""
    pixels = np.array(Image.open(path).convert("RGB")).astype(np.int64)
    return np.char.mod("#%06X", pixels @ [1 << 16, 1 << 8, 1])


def test_a_png_has_every_box_in_its_colour(tmp_path: Path, schedule_file: Path, broken_timeline: Timeline) -> None:
    export(tmp_path / "plan.png", [load_source(schedule_file)])
    seen = colours(tmp_path / "plan.png")
    left, top = round(22 + 3 * 6.6), 34
    per_time = (seen.shape[1] - left - 16) / 11
    assert seen.shape[0] == round(height_of([6 * LANE]))
    for box in (box for box in boxes(LaneTable.from_timeline(broken_timeline)) if box.end > box.start):
        x, y = left + per_time * box.start + 6, top + LANE * (box.lane + 0.5 + box.top) + 3
        assert seen[round(y), round(x)] in {box.paint.fill, *([box.paint.hatch] if box.rerouted else [])}
    assert {palette.FAILURE_BAND, palette.FAILURE_HATCH} <= set(seen[top + round(3.5 * LANE)])
    assert seen[top + LANE // 2, left + round(4.5 * per_time)] == palette.BAND


@pytest.mark.parametrize("unit", [1.0, 2.0**-1060])
def test_a_png_shows_any_number_of_operations_of_any_length(tmp_path: Path, unit: float) -> None:
    """Of a thousand lanes a pixel is the mean of what it shows, so that colours have the area of their time."""
    schedule = one_f_one_b(Shape(pipelines=128, ranks=8, micro_batches=8))
    export(tmp_path / "large.png", [schedule_source(Path("x"), schedule, Profile.uniform(unit, unit, unit))])
    image = np.array(Image.open(tmp_path / "large.png").convert("RGB")).astype(float)
    assert image.shape[0] == round(height_of([1200]))
    lanes, ground = image[34 : 34 + 1200, 60:-20].mean(axis=(0, 1)), np.array([0xF6, 0xF7, 0xF9])
    fills = [[int(paint.fill[i : i + 2], 16) for i in (1, 3, 5)] for paint in palette.PAINTS[:3]]
    busy = 0.74 * 24 / 45
    assert lanes == pytest.approx(busy * np.mean(fills, axis=0) + (1 - busy) * ground, abs=4)
