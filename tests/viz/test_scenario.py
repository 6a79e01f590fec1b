"""The scenario of a page: every figure and lane under it is the simulator's, and a bound of other times goes. Dead and
slow workers and slow links as text; what names nothing is refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recycle import JobError, Profile, Schedule, Shape, Timeline, simulate
from recycle.cli.simulate import figures as simulated_figures
from recycle.errors import PlanError
from recycle.ir.families import FAMILIES, one_f_one_b, zb_h1
from tests.ir.random_schedules import random_schedule
from tests.viz.components import answered, decode, of_type, plain, words
from tests.viz.conftest import planned
from tests.viz.scenarios import expected_timeline, random_scenario
from viz.app import build_app
from viz.condition import parse
from viz.details import headline
from viz.lane_cache import TimedLanes, TimelineContext, encode
from viz.lanes import LaneTable, Marks
from viz.numbers import percent, short
from viz.pages import panels
from viz.pages.compare_page import ComparePage
from viz.pages.page import Workspace
from viz.pages.scenario import curves
from viz.pages.scoreboard_page import OVER, ScoreboardPage, rank
from viz.scenario import PageModel, Scenario, prices_of_file
from viz.sources import ScheduleFile, equal_work_times, family_sources, schedule_source

SHAPE = Shape(3, 4, 2)
GIVEN = Profile.uniform(link=0.5)


def context(schedule: Schedule, profile: Profile = GIVEN, limits: tuple[float, ...] | None = None) -> TimelineContext:
    return TimelineContext.of_plan(simulate(schedule, profile), limits)


def in_times(context: TimelineContext, times: str, workers: str = "") -> TimedLanes:
    return PageModel().entry(TimedLanes(named(context.timeline), context), Scenario.of(times, workers))


def named(timeline: Timeline) -> LaneTable:
    labels = tuple(f"worker {worker}" for worker in timeline.schedule.shape.workers())
    return replace(LaneTable.from_timeline(timeline, marks=Marks([3])), labels=labels)


@pytest.mark.parametrize("link", ["0.5", "0", "7"])
@pytest.mark.parametrize("schedule", [one_f_one_b(Shape(2, 4, 6)), zb_h1(Shape(1, 4, 8))])
def test_other_times_match_the_simulator_and_keep_names_and_violations(schedule: Schedule, link: str) -> None:
    profile = Profile(2.0, [1, 2, 3, 4], [0.5, 0.5, 0.5, 1], latency=float(link), reduce=0.1, step=3.0)
    expected = simulate(schedule, profile)
    entry = in_times(context(schedule), f"F=2 I=1,2,3,4 W=0.5,0.5,0.5,1 link={link} reduce=0.1 step=3")
    assert entry.context.timeline.period == expected.period
    assert entry.context.timeline.critical_path == expected.critical_path
    assert entry.context.timeline.peak_activations == expected.peak_activations
    assert encode(entry.table) == encode(named(expected))


def test_missing_fields_keep_their_values(broken: Schedule) -> None:
    before = context(broken, replace(GIVEN, forward=[1.0, 3.0]), (4.0, 3.0))
    assert in_times(before, "").context is before
    assert in_times(before, "F=1,3 link=0.5 limit=4,3").context is before
    assert in_times(before, "limit=2").context.limits == (2.0, 2.0)
    assert in_times(before, "I=2").context.limits == (4.0, 3.0)


def test_equal_lanes_keep_their_own_limits(broken: Schedule) -> None:
    model = PageModel()
    bare, limited = (schedule_source(Path(str(each)), each) for each in (broken, planned(broken, 11, 10, (4.0, 3.0))))
    addresses = [model.put(file.timed) for file in (bare, limited)]
    for times, limits in (("limit=2", [(2.0, 2.0)] * 2), ("", [None, (4.0, 3.0)])):
        timed = [model.get(model.under(address, Scenario(times))) for address in addresses]
        assert [entry.context.limits for entry in timed] == limits


def test_a_dropped_profile_or_job_gives_all_times_and_limits(broken: Schedule) -> None:
    before, model = context(broken), PageModel()
    lanes = LaneTable.from_timeline(before.timeline)
    profile = Profile([1.0, 3.0], 1.0, 2.0, latency=0.25, speed={"0.1": 1.5}, weight_stash=0.25)
    text = '{"forward": [1, 3], "backward_weight": 2, "latency": 0.25, "speed": {"0.1": 1.5}, "weight_stash": 0.25}'
    entry = model.entry(TimedLanes(lanes, before), Scenario(f"file={model.keep_file('measured.json', text)}"))
    expected = simulate(broken, profile)
    assert entry.context.timeline.period == expected.period
    assert entry.context.timeline.peak_activations == expected.peak_activations
    assert encode(entry.table) == encode(LaneTable.from_timeline(expected))
    job = "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 2\n[times]\nforward = 2\n[memory]\nlimit = 2\n"
    entry = model.entry(TimedLanes(lanes, before), Scenario(f"file={model.keep_file('job.toml', job)} step=1"))
    assert entry.context.timeline.makespan == simulate(broken, Profile.uniform(2.0, step=1.0)).makespan
    assert entry.context.limits == (2.0, 2.0)
    with pytest.raises(JobError, match="file of times is not known to this viewer"):
        model.entry(TimedLanes(lanes, before), Scenario("file=0123"))


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
        prices_of_file(planned_context, name, text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ("F=x", "Forward (F): write a number, or 2, one per stage, of at least 0; got 'x'"),
        ("W=-1", "Backward, weight (W): write"),
        ("I=nan", "Backward, input (I): write"),
        ("link=1,2", "Transfer: write a number, of at least 0"),
        ("limit=1,2,3", "Memory limit: write a number, or 2, one per rank"),
        ("step=1e200", "the times add up to more than"),
        ("G=1", "times: 'G' is not a field; write FIELD=NUMBER with one of F, I, W"),
    ],
)
def test_wrong_fields_are_refused_in_one_line(broken: Schedule, times: str, message: str) -> None:
    with pytest.raises(JobError) as refused:
        in_times(context(broken), times)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_executed_step_and_slow_workers_of_a_plan_keep_their_times(broken_timeline: Timeline) -> None:
    executed = TimelineContext(broken_timeline, executed=True)
    assert in_times(executed, "F=2", "0.1=2").context is executed
    slow = Profile(speed={"0.1": 1.5})
    planned_slow = replace(context(broken_timeline.schedule, slow), condition=parse("0.1=1.5", Shape(3, 2, 2)))
    assert in_times(planned_slow, "", "0.1=1.5").context is planned_slow


def test_the_bound_is_shown_where_it_holds(broken: Schedule) -> None:
    """The bound 10 was proven for times of 1 and 2 activations per worker."""
    before = context(planned(broken, 11.0, 10.0, (2.0, 2.0)), Profile.uniform(), (2.0, 2.0))
    shown = {
        times: {figure.name for figure in headline(in_times(before, times))}
        for times in ("", "limit=1", "limit=3", "F=2")
    }
    assert {times: "bound" in names for times, names in shown.items()} == {
        "": True, "limit=1": True, "limit=3": False, "F=2": False
    }  # fmt: skip


def test_the_page_gets_lanes_and_headline_of_a_scenario(broken: Schedule) -> None:
    client = build_app([schedule_source(Path("broken"), broken)]).server.test_client()
    address = re.search(r"lanes/\w+\.bin", client.get("/").get_data(as_text=True))[0]  # type: ignore[index]

    def send(**body: Any) -> tuple[dict[str, Any], list[bytes]]:
        return answered(client.post("/scenario", json={"addresses": [address], "active": 0, **body}))

    twice, lanes = send(times="F=2", addresses=[address, address])
    expected = simulate(broken, Profile.uniform(2.0))
    assert [decode(each)["description"]["span"] for each in lanes] == [expected.makespan] * 2
    assert client.get("/" + twice["addresses"][1]).data == lanes[1]
    assert twice["headline"][0][:2] == ["period", short(expected.period, 6)]
    assert send()[0]["addresses"] == [address]
    assert "Forward (F): write" in send(times="F=?")[0]["problem"]
    digest = answered(client.post("/scenario", json={"file": ["p.json", '{"forward": 2}']}))[0]["digest"]
    assert send(times=f"file={digest}")[1] == lanes[:1]
    assert send(addresses=["lanes/0.bin"]) == ({"addresses": [None], "headline": []}, [b""])
    refused = [client.post("/scenario", json=body).status_code for body in ({"file": ["p.json"]}, [1], {})]
    large = client.post("/scenario", data=b"x" * 2**21, content_type="application/json").status_code
    assert [*refused, large] == [400, 400, 400, 413]


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 220), marks=pytest.mark.soak)])
def test_every_figure_of_every_page_is_the_simulators(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        schedules = [random_schedule(rng) for _ in range(2)] + [FAMILIES["zb-v"](Shape(1, 4, 4, chunks=2))]
        shares = [share or 1.0 for share in equal_work_times(schedules)]
        files = [
            replace(schedule_source(Path(str(place)), schedule, Profile.uniform(share, share, share)), chunk_time=share)
            for place, (schedule, share) in enumerate(zip(schedules, shares, strict=True))
        ]
        scenario = random_scenario(rng, [schedule.shape for schedule in schedules])
        model = PageModel()
        texts = page_texts(files, model, scenario)
        for file, share in zip(files, shares, strict=True):
            timeline = expected_timeline(file.schedule, share, scenario)
            check_figures(file, timeline, simulated_figures(timeline, timeline.gaps()), model, scenario, texts)


def page_texts(files: list[ScheduleFile], model: PageModel, scenario: Scenario) -> dict[str, list[str]]:
    """The texts of the scoreboard by schedule, and of the comparison's figures."""
    (table,) = of_type(plain(ScoreboardPage(Workspace(files, cache=model)).content(scenario)), "Tbody")
    rows = [words(row) for row in table["children"]]
    compared = ComparePage(Workspace(files, cache=model))
    cards = plain(compared.compare([f"file/{place}" for place in range(3)], scenario=scenario))
    columns = [words(row)[1:4] for row in of_type(cards[0], "Tbody")[0]["children"]]
    names = [words(row)[0] for row in of_type(cards[0], "Tbody")[0]["children"]]
    by_file = {
        str(place): [f"{name}: {column[place]}" for name, column in zip(names, columns, strict=True)]
        for place in range(3)
    }
    return {row[0]: row for row in rows} | {f"compared {name}": lines for name, lines in by_file.items()}


def check_figures(
    file: ScheduleFile, timeline: Timeline, simulated: dict[str, Any], model: PageModel, scenario: Scenario,
    texts: dict[str, list[str]],
) -> None:  # fmt: skip
    entry = model.entry(file.timed, scenario)
    period, makespan, from_idle = (simulated[name] for name in ("period", "makespan", "bubble_ratio"))
    live = [seconds for seconds in timeline.busy if seconds is not None]
    steady = percent(max(0.0, 1 - sum(live) / (period * len(live))))
    held = [peak for peak in simulated["peak_activations"] if peak is not None]
    chunks = file.schedule.shape.chunks
    shown = {figure.name: figure.value for figure in panels.figures_of(entry.context, entry.unit)}
    assert (shown["period"], shown["makespan"]) == (short(period, 6), short(makespan, 6))
    assert (shown["bubbles"], shown["bubbles from idle"]) == (steady, percent(from_idle))
    assert shown["peak memory"].split(" of ")[0] == short(max(held) / chunks)
    row, compared = texts[file.name], texts[f"compared {file.name}"]
    assert set(shown.values()) <= set(row)
    assert {f"{name}: {value}" for name, value in shown.items()} <= set(compared)
    assert {figure.value for figure in headline(entry)} <= set(shown.values())
    workers = words(plain(panels.workers(entry, entry.context)))
    inner = [value for value in simulated["inner_bubble"] if value is not None]
    assert short(max(inner)) in workers
    assert entry.table.span == pytest.approx(makespan)
    critical = words(plain(panels.critical_path(entry, entry.context)))
    assert any(f"makespan of {short(makespan, 6)};" in text for text in critical)
    lost = sum(float(value) for value in entry.context.bubbles.gaps.seconds.sum(axis=0))
    assert lost == pytest.approx(sum(value for value in simulated["bubble"] if value is not None))


def test_a_curve_is_the_period_of_each_schedule_over_one_time() -> None:
    model, files = PageModel(), family_sources(Shape(1, 4, 8))
    timelines = [(each.name, model.put(each.timed)) for each in files if isinstance(each, ScheduleFile)]
    _, figure = curves(model, "link", 1.0, timelines, Scenario("W=2 link=9"))
    lines = {line["name"]: (line["x"], line["y"]) for line in of_type(plain(figure), "Graph")[0]["figure"]["data"]}
    assert len(lines) == len(files)
    for file in files:
        assert isinstance(file, ScheduleFile)
        x, y = lines[file.name]
        for place in (0, 12, 24):
            scenario = Scenario(f"W=2 link={x[place]}")
            assert y[place] == expected_timeline(file.schedule, file.chunk_time or 1.0, scenario).period
    for limit in ("", " limit=5"):
        hint, _ = curves(model, "link", 1.0, timelines, Scenario(f"W=2 link=9{limit}"))
        ranked = rank(files, model, Scenario(f"W=2 link=0{limit}"))
        assert words(plain(hint))[0].startswith(f"{ranked[0].file.name} has the shortest period")
        is_over = [bool(limit) and row.figures["peak memory"].number > 5 for row in ranked]
        assert [row.verdict == OVER for row in ranked] == is_over == sorted(is_over)
        assert any(is_over) == bool(limit)
    assert curves(model, "limit", 1.0, timelines, Scenario()) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("1.2, 0.3", ["0.3", "1.2"]),
        ("pipeline:2", ["2.0", "2.1", "2.2", "2.3"]),
        ("stage:3 0.0", ["0.0", "0.3", "1.3", "2.3"]),
        ("node:0/6", ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1"]),
        ("0.1=1.5, 2.0=0.5", ["0.1=1.5", "2.0=0.5"]),
        ("0.1=1.5 0.1", ["0.1"]),
        ("0.1>0.2=4 1.0", ["1.0", "0.1>0.2=4"]),
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
        ("0.1>0.9=2", "slow links"),
        ("0.1>0.2", "'0.1>0.2': write how many times as long it takes"),
        ("0.0 " * 3000, "3000 are named; at most 2048"),
    ],
)
def test_a_wrong_condition_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse(text, SHAPE)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
