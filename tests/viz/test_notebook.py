"""`schedule.show()` draws in a notebook, says what it is elsewhere, and needs neither dash nor plotly."""

from __future__ import annotations

import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from recycle import Profile, RecycleError, Schedule, Shape, simulate
from recycle.ir.families import one_f_one_b
from recycle.plans import Plan
from viz.notebook import show_run


def test_a_schedule_shows_its_lanes(broken: Schedule, tmp_path: Path) -> None:
    picture = broken.show(title="without 1.1")
    drawn = picture._repr_svg_()
    assert drawn.startswith("<svg")
    assert "without 1.1" in drawn
    assert "F1.0" in drawn
    picture.save(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text() == drawn
    picture.save(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert repr(picture).startswith("<Picture of <Schedule D=3 P=2 m=2")


def test_a_timeline_shows_its_lanes_and_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    timeline = simulate(one_f_one_b(Shape(1, 2, 2)), Profile.uniform(forward=2.0))
    assert timeline._repr_svg_() == one_f_one_b(Shape(1, 2, 2)).show(Profile.uniform(forward=2.0))._repr_svg_()
    assert repr(timeline).endswith(f"makespan {timeline.makespan:g}, period {timeline.period:g}>")
    shown = timeline.show()
    assert capsys.readouterr().out == shown + "\n"
    assert type(shown)._ipython_display_(shown) is None  # IPython prints what a cell ends with, unless told not to


def test_a_page_is_the_viewers_canvas_in_a_frame(broken: Schedule) -> None:
    page = broken.show(title="<without> 1.1").page(height=500)
    frame = page._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert "height:500px" in frame
    assert frame.count("<") == 2  # the frame's own tags: what it holds is text to the notebook
    inside = unescape(frame.split('srcdoc="')[1].split('" style=')[0])
    assert "viz/main.js" in inside
    assert "data:application/gzip;base64," in inside
    assert "&lt;without&gt; 1.1" in inside
    assert repr(page).endswith("a notebook shows it>")


def test_a_plan_is_named_by_its_figures(broken: Schedule) -> None:
    plan = Plan(broken, makespan=11.0, period=11.0, lower_bound=10.0, seconds=0.1, profile="")
    picture = plan.show(Profile.uniform(forward=2.0))
    assert "without 1.1: period 11, gap 10 %" in picture._repr_svg_()
    assert picture.source.lanes.span == simulate(broken, Profile.uniform(forward=2.0)).makespan
    whole = Plan(one_f_one_b(Shape(1, 2, 2)), 9.0, 9.0, 9.0, 0.1, "")
    assert "all workers: period 9, optimal" in whole.show()._repr_svg_()


def test_a_run_is_its_page_in_a_frame(run_dir: Path, tmp_path: Path) -> None:
    inside = unescape(show_run(run_dir, height=700)._repr_html_())
    assert "During the failure, step 4: executed" in inside
    assert "Loss and live workers" in inside
    with pytest.raises(RecycleError):
        show_run(tmp_path / "absent")


def test_too_many_operations_are_no_picture(tmp_path: Path) -> None:
    picture = one_f_one_b(Shape(30, 4, 90)).show()
    assert picture._repr_svg_() is None
    assert "use recycle view" in repr(picture)
    with pytest.raises(RecycleError, match="too many for an SVG"):
        picture.save(tmp_path / "large.svg")


@pytest.mark.process
def test_showing_loads_neither_dash_nor_plotly() -> None:
    code = (
        "import sys; from recycle import Shape; from recycle.ir.families import gpipe;"
        "assert gpipe(Shape(1, 2, 2)).show().svg;"
        "print([m for m in ('dash', 'plotly', 'torch', 'mip') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
