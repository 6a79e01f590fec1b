"""Other times for a timeline: the lanes that come back are the simulator's, and a bound of other times goes. Dead and
slow workers as text: single ones, pipelines, stages and nodes; what names nothing is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recycle import JobError, Profile, Schedule, Shape, simulate
from recycle.errors import PlanError
from recycle.ir.families import one_f_one_b, zb_h1
from tests.viz.components import decode, plain, words
from viz.app import build_app
from viz.details import headline
from viz.lane_cache import CachedLanes, Explainer, encode
from viz.lanes import LaneTable
from viz.pages import scenario
from viz.pages.scenario import parse, times
from viz.sources import schedule_source

SHAPE = Shape(3, 4, 2)
GIVEN = Profile.uniform(link=0.5)
LABELS = ("named",)


def explainer(schedule: Schedule, profile: Profile = GIVEN, limits: tuple[float, ...] | None = None) -> Explainer:
    return Explainer(simulate(schedule, profile), limits=limits)


def in_times(explainer: Explainer, wanted: dict[str, Any]) -> tuple[LaneTable, Explainer]:
    named = replace(LaneTable.from_timeline(explainer.timeline, violations=[3]), labels=LABELS)
    return scenario.retimed(named, explainer, *scenario.by_fields(explainer, wanted))


@pytest.mark.parametrize("link", ["0.5", "0", "7"])
@pytest.mark.parametrize("schedule", [one_f_one_b(Shape(2, 4, 6)), zb_h1(Shape(1, 4, 8))])
def test_other_times_give_what_the_simulator_gives_with_names_and_violations_as_before(
    schedule: Schedule, link: str
) -> None:
    wanted = {"F": "2", "I": "1 2 3 4", "W": "0.5,0.5,0.5,1", "link": link, "reduce": "0.1", "step": "3"}
    profile = Profile(2.0, [1, 2, 3, 4], [0.5, 0.5, 0.5, 1], latency=float(link), reduce=0.1, step=3.0)
    expected = simulate(schedule, profile)
    table, made = in_times(explainer(schedule), wanted)
    assert made.timeline.period == expected.period
    assert made.timeline.critical_path == expected.critical_path
    assert encode(table) == encode(replace(LaneTable.from_timeline(expected, violations=[3]), labels=LABELS))


def test_fields_that_are_left_out_stay_as_they_are(broken: Schedule) -> None:
    before = explainer(broken, replace(GIVEN, forward=[1.0, 3.0]), (4.0, 3.0))
    assert scenario.values_of(before) == {
        "F": "1 3", "I": "1", "W": "1", "link": "0.5", "reduce": "0", "step": "0", "limit": "4 3"
    }  # fmt: skip
    _, made = in_times(before, scenario.values_of(before))
    assert made.timeline is before.timeline
    assert made.limits == (4.0, 3.0)
    _, made = in_times(before, {"limit": "2"})
    assert made.limits == (2.0, 2.0)
    _, made = in_times(before, {"limit": " "})
    assert made.limits is None


def test_a_dropped_profile_or_job_gives_all_times_and_limits(broken: Schedule, tmp_path: Path) -> None:
    given = explainer(broken)
    lanes = LaneTable.from_timeline(given.timeline)
    profile = Profile([1.0, 3.0], 1.0, 2.0, latency=0.25, speed={"0.1": 1.5})
    profile.save(tmp_path / "measured.json")
    asked = scenario.by_file(given, "measured.json", (tmp_path / "measured.json").read_text())
    table, made = scenario.retimed(lanes, given, *asked)
    expected = simulate(broken, profile)
    assert made.timeline.period == expected.period
    assert encode(table) == encode(LaneTable.from_timeline(expected))
    job = "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 2\n[times]\nforward = 2\n[memory]\nlimit = 2\n"
    _, made = scenario.retimed(lanes, given, *scenario.by_file(given, "job.toml", job))
    assert made.timeline.makespan == simulate(broken, Profile.uniform(2.0)).makespan
    assert made.limits == (2.0, 2.0)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.json", '{"forward": [1, 2, 3]}', "p.json: profile: forward"),
        ("p.json", '{"forwards": 1}', "p.json: 'forwards' is not a field of a profile"),
        ("p.json", "[", "p.json: "),
        (
            "j.toml",
            "[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n",
            "j.toml has the shape D=2 P=2 m=2",
        ),
        (
            "j.toml",
            "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 2\n[times]\nprofile = '/etc/passwd'\n",
            "j.toml: [times] profile names a file, which the page does not read",
        ),
        ("j.toml", "x", "j.toml: "),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(broken: Schedule, name: str, text: str, said: str) -> None:
    given = explainer(broken)
    with pytest.raises(JobError) as refused:
        scenario.by_file(given, name, text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"F": "x"}, "Forward (F): write a number, or 2, one per stage, of at least 0; got 'x'"),
        ({"F": "1 2 3"}, "Forward (F): write a number, or 2, one per stage"),
        ({"W": "-1"}, "Backward, weight (W): write"),
        ({"I": "nan"}, "Backward, input (I): write"),
        ({"link": "1 2"}, "Transfer: write a number, of at least 0"),
        ({"limit": "1 2 3"}, "Memory limit: write a number, or 2, one per rank"),
        ({"step": "1e200"}, "the times add up to more than"),
        ({"F": ["1"]}, "Forward (F): write"),
    ],
)
def test_what_is_no_time_is_refused_in_one_line(broken: Schedule, wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as refused:
        in_times(explainer(broken), wanted)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_ran_keeps_its_times(broken_timeline: Any) -> None:
    ran = Explainer(broken_timeline, executed=True)
    with pytest.raises(JobError, match="an executed step keeps its measured times"):
        in_times(ran, {"F": "2"})
    shown = CachedLanes(LaneTable.from_timeline(broken_timeline), b"", ran)
    assert words(plain(times(shown, ran)))[0] == "What ran has the times that it had."


def test_the_bound_is_shown_where_it_holds(broken: Schedule) -> None:
    """The bound 10 was proven for times of 1 and 2 activations per worker."""
    limited = broken.with_metadata(limits=[2, 2])
    given = explainer(limited, Profile.uniform(), (2.0, 2.0))

    def names(wanted: dict[str, str]) -> set[str]:
        table, made = in_times(given, wanted)
        return {figure.name for figure in headline(CachedLanes(table, b"", made))}

    assert "bound" in names({})
    assert "bound" in names({"limit": "1"})
    assert "bound" not in names({"limit": "3"})
    assert "bound" not in names({"limit": ""})
    assert "bound" not in names({"F": "2"})


def test_the_page_gets_lanes_and_headline_of_other_times(broken: Schedule) -> None:
    client = build_app([schedule_source(Path("broken"), broken)]).server.test_client()
    page = client.get("/").get_data(as_text=True)
    address = re.search(r"lanes/\w+\.bin", page)[0]  # type: ignore[index]
    route = "/" + address.replace("lanes/", "retime/")
    answer = client.post(route, json={"F": "2"}).get_json()
    content = client.get("/" + answer["address"]).data
    expected = simulate(broken, Profile.uniform(2.0))
    assert decode(content)["description"]["span"] == expected.makespan
    assert words(answer["headline"])[:2] == ["period ", f"{expected.period:.4g}"]
    assert client.post(route, json={}).get_json()["address"] == address
    assert "Forward (F): write" in client.post(route, json={"F": "?"}).get_json()["problem"]
    by_file = client.post(route, json={"file": ["p.json", '{"forward": 2}']}).get_json()
    assert by_file["address"] == answer["address"]
    assert client.post(route, json={"file": ["p.json"]}).status_code == 400
    assert client.post(route, json=[1]).status_code == 400
    assert client.post(route, data=b"x" * 2**21, content_type="application/json").status_code == 413
    assert client.post("/retime/0.bin", json={}).status_code == 404


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("1.2, 0.3", ["0.3", "1.2"]),
        ("pipeline:2", ["2.0", "2.1", "2.2", "2.3"]),
        ("stage:3 0.0", ["0.0", "0.3", "1.3", "2.3"]),
        ("node:0/6", ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1"]),
        ("0.1=1.5, 2.0=0.5", ["0.1=1.5", "2.0=0.5"]),
        ("0.1=1.5 0.1", ["0.1"]),
        ("", []),
    ],
)
def test_a_text_names_workers_and_is_written_again(text: str, names: list[str]) -> None:
    found = parse(text, SHAPE)
    assert found.names() == names
    assert parse(",".join(names), SHAPE) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("7.0", "failed workers"),
        ("rank:1", "'rank:1' is none of the forms: 1.2, pipeline:0"),
        ("pipeline:3", "'pipeline:3' names nothing of D=3 P=4 m=2"),
        ("stage:-1", "'stage:-1' names nothing"),
        ("node:2/6", "'node:2/6' names nothing"),
        ("node:0", "'node:0' names nothing"),
        ("node:0/0", "'node:0/0' names nothing"),
        ("0.1=0", "'0.1=0': write how many times as long it takes"),
        ("0.1=x", "'0.1=x': write how many times"),
        ("9.9=2", "slow workers"),
        ("0.0 " * 3000, "3000 are named; at most 2048"),
    ],
)
def test_what_names_nothing_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse(text, SHAPE)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
