"""Which times the schedules of one page get where nobody says, and all families as sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle import Profile, Schedule, ScheduleError, Shape
from recycle.ir.families import FAMILIES
from viz.pages.schedule_page import SchedulePage
from viz.sources import ScheduleFile, equal_work, family_sources, load_sources


def files(*paths: Path) -> list[ScheduleFile]:
    return [source for source in load_sources(paths) if isinstance(source, ScheduleFile)]


def periods(sources: list[ScheduleFile]) -> list[float]:
    return [source.timeline.period for source in sources if source.timeline is not None]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    one, two = tmp_path / "1f1b.json", tmp_path / "zb-v.json"
    FAMILIES["1f1b"](Shape(1, 4, 8)).save(one)
    FAMILIES["zb-v"](Shape(1, 4, 8, 2)).save(two)
    return one, two


def test_files_of_unlike_chunks_have_the_same_work_and_the_page_says_so(saved: tuple[Path, Path]) -> None:
    assert [periods(files(path)) for path in saved] == [[33], [48]]  # alone each chunk takes 1
    both = files(*saved)
    assert periods(both) == [33, 24]
    assert SchedulePage(both).times().endswith("so for a chunk 1 in 1f1b.json; 0.5 in zb-v.json.")
    assert SchedulePage(files(saved[0], saved[0])).times() == ""


def test_what_somebody_says_counts(saved: tuple[Path, Path]) -> None:
    unit = load_sources(saved, lambda path, schedule: Profile.uniform())
    assert [source.timeline.period for source in unit if isinstance(source, ScheduleFile) and source.timeline] == [
        33,
        48,
    ]
    Profile.uniform(2, 2, 2).save(saved[1].with_name("zb-v.profile.json"))
    assert periods(files(*saved)) == [33, 96]


def test_all_families_stand_side_by_side_with_the_same_work() -> None:
    found = {source.name: source for source in family_sources(Shape(1, 4, 8)) if isinstance(source, ScheduleFile)}
    assert set(found) == set(FAMILIES)
    shown = {name: source.timeline.period for name, source in found.items() if source.timeline is not None}
    assert (shown["1f1b"], shown["interleaved"], shown["zb-v"], shown["v-min"]) == (33, 28.5, 24, 29.5)
    odd = {source.name for source in family_sources(Shape(2, 3, 4))}
    assert {"1f1b", "gpipe", "zb-h1"} <= odd


def test_a_shape_that_no_family_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(shape: Shape) -> Schedule:
        raise ScheduleError("none: needs another shape")

    monkeypatch.setattr("viz.sources.FAMILIES", {"none": refuses})
    with pytest.raises(ScheduleError, match="no family takes D=1 P=2 m=2; the last one says: none: needs another"):
        family_sources(Shape(1, 2, 2))


def test_a_cut_counts_as_one_chunk() -> None:
    cut = Schedule.from_text(Shape(1, 1, 1, cut=(1, 1)), {"0.0": "0F0 1F0 1B0 0B0"}, placement={"0.0": [0, 1]})
    assert equal_work([cut, FAMILIES["1f1b"](Shape(1, 2, 2))]) == [None, None]
