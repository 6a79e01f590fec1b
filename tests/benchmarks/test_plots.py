"""The comparison's pictures: well-formed, the same every time, bars as long as their figures."""

from xml.etree import ElementTree

import pytest
from recycle.systems.setting import Setting

from benchmarks.paper.plots import write_plots
from recycle.job import Job
from recycle.systems.comparison import compare
from recycle.systems.failure_generator import Generator

JOB = "[shape]\npipelines = 3\nranks = 4\nmicro_batches = 6\n[memory]\nlimit = 6\n"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def compared():
    setting = Setting.of(Job.from_toml(JOB))
    trace = Generator(days=20, rate=80, seed=3).trace(setting.nodes)
    (found,) = compare(setting, [trace], ["recycle", "bamboo", "checkpoint_restart"])
    return found


@pytest.mark.slow
def test_bars_are_as_long_as_their_figures(compared, tmp_path):
    names = write_plots(compared, "a <test>", tmp_path)
    assert list(names) == ["comparison-goodput.svg", "comparison-rates.svg", "comparison-lost.svg"]
    trees = {name: ElementTree.parse(tmp_path / name).getroot() for name in names}
    assert {name: tree.findtext(f"{SVG}title") for name, tree in trees.items()} == names
    bars = [float(bar.get("width", 0)) for bar in trees["comparison-goodput.svg"].findall(f"{SVG}rect")[1:]]
    goodput = [outcome.goodput for outcome in compared.outcomes]
    assert bars == pytest.approx([bars[0] * one / goodput[0] for one in goodput], abs=0.06)
    lines = trees["comparison-rates.svg"].findall(f"{SVG}polyline")
    assert len(lines) == 3  # two systems that fit, and the nodes alive
    assert "does not fit" in [text.text for text in trees["comparison-goodput.svg"].iter(f"{SVG}text")]
