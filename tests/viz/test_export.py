"""An export is whole: it opens without a server, a network, or a script from elsewhere; so are pages in a notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recycle import Profile, RecycleError, Schedule, Shape, Timeline, simulate
from recycle.ir.families import one_f_one_b
from recycle.plans import Plan
from viz.export import SVG_LIMIT, export
from viz.figures import palette
from viz.figures.boxes import boxes
from viz.figures.svg import LANE, height_of
from viz.lanes import LaneTable
from viz.notebook import show_run
from viz.sources import load_sources, schedule_source

PLOTLY = re.compile(r"<script>/\*\*.*?</script>", re.DOTALL)


def outside_references(page: str) -> list[str]:
    """Everything a browser would fetch: sources, links, style imports and addresses outside of plotly.js itself."""
    loads = re.findall(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)\s*=", page)
    without_library = PLOTLY.sub("", page)
    addresses = re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+|@import|url\(", without_library)
    return loads + addresses


def test_a_run_is_one_page_with_all_its_figures(run_dir: Path, tmp_path: Path) -> None:
    export(tmp_path / "run.html", load_sources([run_dir]))
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert outside_references(page) == []
    assert page.count("Plotly.newPlot(") == 2  # lanes draw their axes
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
    export(tmp_path / "plan.html", load_sources([schedule_file]))
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert outside_references(page) == []
    assert len(page) < 250_000  # lanes need no plotly.js
    assert '<th scope="row">period</th><td>11</td>' in page
    assert "<td>10 (gap 10 %)</td>" in page


def test_a_name_cannot_become_markup(tmp_path: Path, broken: Schedule) -> None:
    broken.save(tmp_path / "a<b>&c.json")
    export(tmp_path / "out.html", load_sources([tmp_path / "a<b>&c.json"]))
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "a&lt;b&gt;&amp;c.json" in page
    assert "a<b>" not in PLOTLY.sub("", page)


def test_a_run_without_iterations_exports_a_page_but_no_svg(empty_run_dir: Path, tmp_path: Path) -> None:
    source = load_sources([empty_run_dir])[0]
    assert source.panels() == []
    export(tmp_path / "run.html", [source])
    assert "No iteration ran yet." in (tmp_path / "run.html").read_text(encoding="utf-8")
    with pytest.raises(RecycleError, match="nothing to draw"):
        export(tmp_path / "run.svg", [source])


def test_other_exports_are_refused(schedule_file: Path, tmp_path: Path) -> None:
    from recycle.ir.families import gpipe

    source = load_sources([schedule_file])[0]
    with pytest.raises(RecycleError, match=r"cannot export \.pdf: use one of \.html, \.svg, \.png"):
        export(tmp_path / "plan.pdf", [source])
    with pytest.raises(RecycleError, match="cannot be written"):
        export(tmp_path / "absent" / "plan.svg", [source])
    gpipe(Shape(pipelines=16, ranks=8, micro_batches=80)).save(tmp_path / "large.json")
    with pytest.raises(RecycleError, match=f"too many for an SVG .at most {SVG_LIMIT}"):
        export(tmp_path / "large.svg", load_sources([tmp_path / "large.json"]))


def colours(path: Path) -> np.ndarray:
    """The colours of a PNG, hexadecimal."""
    pixels = np.array(Image.open(path).convert("RGB")).astype(np.int64)
    return np.char.mod("#%06X", pixels @ [1 << 16, 1 << 8, 1])


def test_a_png_has_every_box_in_its_colour(tmp_path: Path, schedule_file: Path, broken_timeline: Timeline) -> None:
    export(tmp_path / "plan.png", load_sources([schedule_file]))
    pixels = colours(tmp_path / "plan.png")
    left, top = round(22 + 3 * 6.6), 34
    per_time = (pixels.shape[1] - left - 16) / 11
    assert pixels.shape[0] == round(height_of([6 * LANE]))
    for box in (box for box in boxes(LaneTable.from_timeline(broken_timeline)) if box.end > box.start):
        x, y = left + per_time * box.start + 6, top + LANE * (box.lane + 0.5 + box.top) + 3
        assert pixels[round(y), round(x)] in {box.paint.fill, *([box.paint.hatch] if box.rerouted else [])}
    assert {palette.FAILURE_BAND, palette.FAILURE_HATCH} <= set(pixels[top + round(3.5 * LANE)])
    assert pixels[top + LANE // 2, left + round(4.5 * per_time)] == palette.BAND


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


def test_a_schedule_shows_its_lanes(broken: Schedule, tmp_path: Path) -> None:
    picture = broken.show(title="without 1.1")
    drawn = picture._repr_svg_()
    assert drawn.startswith("<svg")
    picture.save(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text() == drawn
    plan = Plan(broken, makespan=11.0, period=11.0, lower_bound=10.0, seconds=0.1, profile="")
    assert "without 1.1: period 11, gap 10 %" in plan.show(Profile.uniform(forward=2.0))._repr_svg_()


def test_a_timeline_shows_its_lanes_and_prints_its_grid(capsys: pytest.CaptureFixture[str]) -> None:
    timeline = simulate(one_f_one_b(Shape(1, 2, 2)), Profile.uniform(forward=2.0))
    assert timeline._repr_svg_() == one_f_one_b(Shape(1, 2, 2)).show(Profile.uniform(forward=2.0))._repr_svg_()
    text = timeline.show()
    assert capsys.readouterr().out == text + "\n"
    assert type(text)._ipython_display_(text) is None  # IPython prints what a cell ends with, unless told not to


def test_a_page_is_the_viewers_canvas_in_a_frame(broken: Schedule) -> None:
    frame = broken.show(title="<without> 1.1").page(height=500)._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert frame.count("<") == 2  # the frame's own tags: its content is text to the notebook
    inside = unescape(frame.split('srcdoc="')[1].split('" style=')[0])
    for text in ("viz/main.js", "data:application/gzip;base64,", "&lt;without&gt; 1.1"):
        assert text in inside


def test_a_run_is_its_page_in_a_frame(run_dir: Path, tmp_path: Path) -> None:
    inside = unescape(show_run(run_dir, height=700)._repr_html_())
    assert "During the failure, step 4: executed" in inside
    assert "Loss and live workers" in inside
    with pytest.raises(RecycleError):
        show_run(tmp_path / "absent")


@pytest.mark.process
def test_showing_loads_neither_dash_nor_plotly() -> None:
    code = (
        "import sys; from recycle import Shape; from recycle.ir.families import gpipe;"
        "assert gpipe(Shape(1, 2, 2)).show().svg;"
        "print([m for m in ('dash', 'plotly', 'torch', 'mip') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
