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
from tests.viz.conftest import planned
from viz.app import build_app
from viz.details import headline
from viz.lane_cache import CachedLanes, TimelineContext, encode
from viz.lanes import LaneTable
from viz.pages import scenario
from viz.pages.scenario import parse, time_fields
from viz.sources import schedule_source

SHAPE = Shape(3, 4, 2)
GIVEN = Profile.uniform(link=0.5)
LABELS = ("named",)


def context(schedule: Schedule, profile: Profile = GIVEN, limits: tuple[float, ...] | None = None) -> TimelineContext:
    return TimelineContext.of_plan(simulate(schedule, profile), limits)


def in_times(context: TimelineContext, texts: dict[str, Any]) -> tuple[LaneTable, TimelineContext]:
    named = replace(LaneTable.from_timeline(context.timeline, violations=[3]), labels=LABELS)
    return scenario.retime(named, context, *scenario.from_fields(context, texts))


@pytest.mark.parametrize("link", ["0.5", "0", "7"])
@pytest.mark.parametrize("schedule", [one_f_one_b(Shape(2, 4, 6)), zb_h1(Shape(1, 4, 8))])
def test_other_times_match_the_simulator_and_keep_names_and_violations(schedule: Schedule, link: str) -> None:
    texts = {"F": "2", "I": "1 2 3 4", "W": "0.5,0.5,0.5,1", "link": link, "reduce": "0.1", "step": "3"}
    profile = Profile(2.0, [1, 2, 3, 4], [0.5, 0.5, 0.5, 1], latency=float(link), reduce=0.1, step=3.0)
    expected = simulate(schedule, profile)
    table, retimed = in_times(context(schedule), texts)
    assert retimed.timeline.period == expected.period
    assert retimed.timeline.critical_path == expected.critical_path
    assert retimed.timeline.peak_activations == expected.peak_activations
    assert encode(table) == encode(replace(LaneTable.from_timeline(expected, violations=[3]), labels=LABELS))


def test_missing_fields_keep_their_values(broken: Schedule) -> None:
    before = context(broken, replace(GIVEN, forward=[1.0, 3.0]), (4.0, 3.0))
    assert scenario.field_values(before) == {
        "F": "1 3", "I": "1", "W": "1", "link": "0.5", "reduce": "0", "step": "0", "limit": "4 3"
    }  # fmt: skip
    _, retimed = in_times(before, scenario.field_values(before))
    assert retimed.timeline is before.timeline
    assert retimed.limits == (4.0, 3.0)
    _, retimed = in_times(before, {"limit": "2"})
    assert retimed.limits == (2.0, 2.0)
    _, retimed = in_times(before, {"limit": " "})
    assert retimed.limits is None


def test_a_dropped_profile_or_job_gives_all_times_and_limits(broken: Schedule, tmp_path: Path) -> None:
    before = context(broken)
    lanes = LaneTable.from_timeline(before.timeline)
    profile = Profile([1.0, 3.0], 1.0, 2.0, latency=0.25, speed={"0.1": 1.5}, weight_stash=0.25)
    profile.save(tmp_path / "measured.json")
    priced = scenario.from_file(before, "measured.json", (tmp_path / "measured.json").read_text())
    table, retimed = scenario.retime(lanes, before, *priced)
    expected = simulate(broken, profile)
    assert retimed.timeline.period == expected.period
    assert retimed.timeline.peak_activations == expected.peak_activations
    assert encode(table) == encode(LaneTable.from_timeline(expected))
    job = "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 2\n[times]\nforward = 2\n[memory]\nlimit = 2\n"
    _, retimed = scenario.retime(lanes, before, *scenario.from_file(before, "job.toml", job))
    assert retimed.timeline.makespan == simulate(broken, Profile.uniform(2.0)).makespan
    assert retimed.limits == (2.0, 2.0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
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
def test_other_files_of_times_are_refused_in_one_line(broken: Schedule, name: str, text: str, message: str) -> None:
    planned_context = context(broken)
    with pytest.raises(JobError) as refused:
        scenario.from_file(planned_context, name, text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"F": "x"}, "Forward (F): write a number, or 2, one per stage, of at least 0; got 'x'"),
        ({"W": "-1"}, "Backward, weight (W): write"),
        ({"I": "nan"}, "Backward, input (I): write"),
        ({"link": "1 2"}, "Transfer: write a number, of at least 0"),
        ({"limit": "1 2 3"}, "Memory limit: write a number, or 2, one per rank"),
        ({"step": "1e200"}, "the times add up to more than"),
    ],
)
def test_wrong_fields_are_refused_in_one_line(broken: Schedule, texts: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as refused:
        in_times(context(broken), texts)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_executed_step_keeps_its_times(broken_timeline: Any) -> None:
    executed = TimelineContext(broken_timeline, executed=True)
    with pytest.raises(JobError, match="an executed step keeps its measured times"):
        in_times(executed, {"F": "2"})
    entry = CachedLanes(LaneTable.from_timeline(broken_timeline), b"", executed)
    assert words(plain(time_fields(entry, executed)))[0] == "An executed step keeps its measured times."


def test_the_bound_is_shown_where_it_holds(broken: Schedule) -> None:
    """The bound 10 was proven for times of 1 and 2 activations per worker."""
    limited = planned(broken, 11.0, 10.0, (2.0, 2.0))
    before = context(limited, Profile.uniform(), (2.0, 2.0))

    def names(texts: dict[str, str]) -> set[str]:
        table, retimed = in_times(before, texts)
        return {figure.name for figure in headline(CachedLanes(table, b"", retimed))}

    assert "bound" in names({})
    assert "bound" in names({"limit": "1"})
    assert "bound" not in names({"limit": "3"})
    assert "bound" not in names({"limit": ""})
    assert "bound" not in names({"F": "2"})


def test_the_page_gets_lanes_and_headline_of_other_times(broken: Schedule) -> None:
    client = build_app([schedule_source(Path("broken"), broken)]).server.test_client()
    address = re.search(r"lanes/\w+\.bin", client.get("/").get_data(as_text=True))[0]  # type: ignore[index]
    route = "/" + address.replace("lanes/", "retime/")
    answer = client.post(route, json={"F": "2"}).get_json()
    expected = simulate(broken, Profile.uniform(2.0))
    assert decode(client.get("/" + answer["address"]).data)["description"]["span"] == expected.makespan
    assert words(answer["headline"])[:2] == ["period ", f"{expected.period:.4g}"]
    assert client.post(route, json={}).get_json()["address"] == address
    assert "Forward (F): write" in client.post(route, json={"F": "?"}).get_json()["problem"]
    from_file = client.post(route, json={"file": ["p.json", '{"forward": 2}']}).get_json()
    assert from_file["address"] == answer["address"]
    refused = [client.post(route, json=body).status_code for body in ({"file": ["p.json"]}, [1])]
    large = client.post(route, data=b"x" * 2**21, content_type="application/json").status_code
    assert [*refused, large, client.post("/retime/0.bin", json={}).status_code] == [400, 400, 413, 404]


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
def test_a_condition_is_read_and_written_as_text(text: str, names: list[str]) -> None:
    condition = parse(text, SHAPE)
    assert condition.names() == names
    assert parse(",".join(names), SHAPE) == condition


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7.0", "failed workers"),
        ("rank:1", "'rank:1' is not a worker or group: write 1.2, pipeline:0"),
        ("pipeline:3", "'pipeline:3' does not exist in D=3 P=4 m=2"),
        ("node:2/6", "'node:2/6' does not exist"),
        ("node:0/0", "'node:0/0' does not exist"),
        ("0.1=0", "'0.1=0': write how many times as long it takes"),
        ("9.9=2", "slow workers"),
        ("0.0 " * 3000, "3000 are named; at most 2048"),
    ],
)
def test_a_wrong_condition_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse(text, SHAPE)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
