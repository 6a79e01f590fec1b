"""Every system, change by change: events, costs, configurations, and stops."""

from dataclasses import replace
from functools import partial

import pytest

from recycle import Job, check, lower, simulate
from recycle.job.layers import Layer
from recycle.systems import DoesNotFit, Scenario
from recycle.systems.bamboo.bamboo import Bamboo
from recycle.systems.checkpoint_restart import CheckpointRestart, HotSpare, JobRestart, LiveMigration
from recycle.systems.elaswave import ElasWave
from recycle.systems.oobleck.oobleck import Oobleck
from recycle.systems.recycle import ReCycle
from recycle.systems.sample_dropping import SampleDropping
from tests.systems.scenarios import Play, scenario


def bamboo(pipelines=4, **other) -> Bamboo:
    return Bamboo(scenario(pipelines, 4, 6, **other))


def templated(**other) -> Scenario:
    """13 nodes, 12 layers of 1 byte of state; 4 of them and their activations fit: n0 = 3."""
    layer = {"static": 1.0, "state": 1.0, "activation": 0.0, **other.pop("layer", {})}
    fitting = {"memory": (4.0,) * 4, "bandwidth": 1.0, "node_of": tuple(range(13)), **other}
    return scenario(3, 4, 8, layers=12, layer=layer, **fitting)


def oobleck(**other) -> Oobleck:
    return Oobleck(templated(**other))


def gridded(memory=30.0, failure_rate=1e-6) -> Scenario:
    """Pipelines of four stages of one layer; two layers on one worker do not fit."""
    layer = {"static": 20.0, "state": 16.0}
    return scenario(4, 4, 6, layer=layer, memory=(memory,) * 4, bandwidth=8.0, failure_rate=failure_rate)


def of_job(pipelines: int, ranks: int, micro_batches: int) -> Scenario:
    shape = f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {micro_batches}\n"
    return Scenario.of(Job.from_toml(f"{shape}[memory]\nlimit = {micro_batches}\n"))


def planned(**other) -> ReCycle:
    return ReCycle(of_job(3, 4, 6), **other)


def weighty(failure_rate=0.0, **other) -> ReCycle:
    layers = (Layer(1.0, 1.0, 1.0, static=100.0, state=80.0),) * 4
    weighed = replace(of_job(4, 4, 8), layers=layers, bandwidth=10.0, memory=(200.0,) * 4, failure_rate=failure_rate)
    return ReCycle(weighed, **other)


def elaswave(memory=400.0) -> ElasWave:
    """Two pipelines of four stages of three layers each, with 12 micro-batches; layers weigh 20 bytes."""
    layer = {"static": 20.0, "state": 16.0}
    system = ElasWave(scenario(2, 4, 12, layers=12, layer=layer, memory=(memory,) * 4, bandwidth=8.0))
    if memory > 50.0:  # the grid of the job, whatever other grid is faster
        grid = system.grids.grid(2, 4)
        system.grids.best = lambda slots: grid
    return system


MAKERS = {
    "bamboo": bamboo,
    # Worker 2 comes back with nothing: its stage and the copy of the next one are copied.
    "large bamboo": partial(bamboo, 12, layer={"state": 7e9}, bandwidth=1e9),
    "bamboo on nodes of two": partial(bamboo, node_of=tuple(slot // 2 for slot in range(16))),
    "oobleck": oobleck,
    # Templates of 4, 6, ... stages; the layers of a node's two workers are one range.
    "oobleck on nodes of two": partial(oobleck, node_of=tuple(slot // 2 for slot in range(12))),
    "oobleck on uneven nodes": partial(oobleck, node_of=(0, 0, 1, 1, 2, 2, 3, 3, 4)),
    "oobleck without bytes": lambda: Oobleck(scenario(3, 4, 6)),
    # Without bytes nothing says that two stages fit on one worker, so a pipeline has the job's four stages.
    "oobleck on four": lambda: Oobleck(scenario(1, 4, 6)),
    "oobleck on nodes of three": lambda: Oobleck(scenario(3, 4, 6, node_of=tuple(slot // 3 for slot in range(12)))),
    "oobleck of one micro-batch": lambda: Oobleck(scenario(1, 1, 1, node_of=(0, 1))),
    "checkpoint_restart": lambda: CheckpointRestart(gridded()),
    "checkpoint_restart under many failures": lambda: CheckpointRestart(gridded(failure_rate=1e-3)),
    "hot_spare": lambda: HotSpare(gridded(), spares=4),
    "live_migration": lambda: LiveMigration(gridded(), spares=4),
    "job_restart": lambda: JobRestart(gridded(), spares=4),
    "sample_dropping": lambda: SampleDropping(gridded()),
    "elaswave": elaswave,
    # Three layers and the activations of four micro-batches are 72 bytes; four layers do not fit into 80.
    "small elaswave": partial(elaswave, 80.0),
    "recycle": planned,
    "heavy recycle": weighty,
    "heavy recycle in place": partial(weighty, move=False),
    "heavy recycle under many failures": partial(weighty, 1.0),
}
SCENARIOS = [
    # What does not fill a pipeline waits, and its loss costs nothing.
    ("bamboo", "", "begin: period=31, samples=24, idle=0, reconsider=False"),
    ("bamboo", "0-13", "begin: layout=3 x 4, idle=2, period=39", "-13: seconds=0, loss=nothing, live=0-12"),
    (
        *("bamboo", "0-1", "begin: runs=False, reason=2 worker(s); a pipeline needs 4", "+2: runs=False"),
        "+3: event=restart, runs=True, detect=0, rebuild=2, restart=60",
    ),
    # The predecessor takes over and the iteration continues: of stage 2 at most S - 2 = 2 micro-batches were in flight,
    # whose backwards take 4. One of 15 is overloaded, 2 / 15 > 5 %, so that pipelines are rearranged at the next
    # boundary, of workers that hold what they need.
    (
        *("bamboo", "", "-2: event=take over, loss=nothing, bytes=0, period=40, detect=5, rebuild=2, copy=4"),
        ": event=rearrange, loss=nothing, bytes=0, detect=0, plan=20, rebuild=2, pipelines=0123 0123 0123, idle=3",
        "+2: event=rearrange, layout=4 x 4, idle=0",
    ),
    ("bamboo", "", "-2: reconsider=True, pipelines=0113 0123 0123 0123", ": reconsider=False"),
    # Two neighbours are fatal, at once or not.
    *(
        ("bamboo", "", *first, f"{last}: event=fatal, loss=checkpoint, detect=5, rebuild=2, restart=60, {left}")
        for left in ("pipelines=0123 0123 0123, idle=2",)
        for first, last in ((["-2"], "-1"), (["-2"], "-3"), ([], "-2 -1"), ([], "-2 -3"))
    ),
    ("bamboo", "", "-1 -3 -9: event=take over, pipelines=0022 0123 0023 0123"),
    # 2 / 47 < 5 %: one overloaded worker stays until others wait.
    (
        "large bamboo",
        "",
        "-2: reconsider=False",
        "+2: event=rearrange, layout=12 x 4, live=0-47, bytes=1.4e+10, copy=14",
    ),
    # A node of two dies: two pipelines, or two distant ranks, and not two neighbours.
    *(("bamboo on nodes of two", "", f"-{node}: event=take over") for node in range(8)),
    ("oobleck", "0-5", "begin: pipelines=012 345"),
    ("oobleck", "0-4", "begin: runs=False, reason=5 node(s); 2 pipelines need 6"),
    # Of four stages of 3 layers the third dies, and three stages of 4 layers take 1, 2 and 1 more in.
    (
        *("oobleck", "0-6", "begin: pipelines=0123 456, shares=(14; 10)"),
        "-2: event=shrink, loss=iteration, pipelines=013 456, shares=(12; 12), bytes=4, detect=5, rebuild=2, copy=2",
    ),
    ("oobleck", "0-6", "-4: event=borrow, loss=iteration, sizes=[3; 3]"),
    ("oobleck", "0-8", "begin: sizes=[3; 3; 3]", "-0: event=merge, sizes=[3; 5]"),
    (
        *("oobleck", "0-5", "-4: event=stop, loss=checkpoint, runs=False", ": runs=False"),
        "+9: event=restart, live=0-3 5 9, detect=0, rebuild=2, restart=60",
    ),
    # A layer without a replica is read from the checkpoint; a join is taken in with what it lacks.
    ("oobleck", "0-8", "-1 -4 -7: event=restart, loss=checkpoint, sizes=[3; 3], detect=5, rebuild=2, restart=60"),
    ("oobleck", "0-5", "+6: event=join, loss=nothing, sizes=[3; 4], detect=0, rebuild=2, copy=3, bytes=4"),
    ("oobleck on nodes of two", "", "begin: idle=0", "-0: idle=0, runs=True"),
    ("oobleck on uneven nodes", "", "begin: idle=1"),
    ("oobleck without bytes", "0-10", "begin: sizes=[4; 4], idle=3"),
    ("oobleck on four", "", "begin: reason=4 node(s); 2 pipelines need 8"),
    ("oobleck without bytes", "0-6", "begin: reason=7 node(s); 2 pipelines need 8"),
    (
        *("oobleck on nodes of three", ""),
        "begin: reason=no pipeline of whole nodes; of 3 worker(s) each; has as many stages as it needs",
    ),
    ("oobleck of one micro-batch", "", "begin: runs=False"),
    (
        *("checkpoint_restart", "", "begin: layout=4 x 4, idle=0, period=27"),
        "-5: loss=checkpoint, event=restart, restart=60, layout=3 x 4, idle=3, period=33",
        "-15: event=wait, seconds=0, idle=2",
        "+5 +15: loss=nothing, event=restart, layout=4 x 4",
    ),
    ("checkpoint_restart", "0-2", "begin: runs=False"),
    ("checkpoint_restart under many failures", "", "-5: event=restart", "+5: event=wait"),
    *(
        (
            *(name, "", "begin: layout=3 x 4, idle=4"),
            f"-5: event=replace, loss={loss}, bytes=16, copy=2, speed=as begun, idle=3, used=0-4 6-12",
            "+5: event=wait, idle=4",
        )
        for name, loss in (("hot_spare", "iteration"), ("live_migration", "nothing"))
    ),
    ("hot_spare", "", "-0 -1 -2 -3 -4: event=restart, loss=checkpoint, layout=2 x 4"),
    ("hot_spare", "", "-1 -5 -9: event=restart, loss=checkpoint, layout=3 x 4"),
    (
        *("job_restart", "", "begin: layout=3 x 4, idle=4"),
        "-5: event=restart, loss=checkpoint, restart=60, speed=as begun, idle=3, used=0-4 6-12",
    ),
    ("sample_dropping", "", "-0: event=drop, loss=iteration, speed=as begun, samples=18, dropped=6"),
    ("sample_dropping", "", "-0 -4: event=drop, loss=iteration, speed=as begun, samples=12, dropped=12"),
    ("sample_dropping", "", "-0 -4 -8: event=drop, loss=iteration, speed=as begun, samples=6, dropped=18"),
    ("sample_dropping", "", "-0 -4 -8 -12: event=restart, loss=checkpoint"),
    (
        *("sample_dropping", "", "-0 -4: reconsider=True"),
        ": event=join, bytes=64, layout=3 x 4, detect=0, reconsider=False",
    ),
    ("elaswave", "", "begin: layout=2 x 4, period=135, idle=0"),
    # Slot 5 is rank 1 of pipeline 1: its rank 0 takes on layer 3, rank 2 layers 4 and 5 and rank 3 layer 8.
    (
        *("elaswave", "", "-5: event=re-cut, loss=iteration, bytes=64, rebuild=1, copy=0"),
        "+5: event=join, loss=nothing, layout=2 x 4, speed=as begun, members=((0; 1; 2; 3); (4; 5; 6; 7))",
    ),
    ("elaswave", "", "-1 -5: event=restart, loss=checkpoint"),
    ("small elaswave", "0-4 6-7", "begin: layout=1 x 4, idle=3"),
    ("small elaswave", "0-2 4-5", "begin: runs=False"),
    (
        *("recycle", "", "-6: loss=iteration, event=re-route, bytes=0, detect=5, rebuild=2, copy=0"),
        "+6: loss=nothing, event=join, detect=0, speed=as begun, live=0-11",
    ),
    # A stage without workers restores a checkpoint.
    (
        *("recycle", "", "-1 -5 -9: loss=checkpoint, event=restart, used=0 2-4 6-8 10-11"),
        "-4 -6 -7 -8 -10 -11: event=stop, runs=False",
        "+9: event=restart, used=0 2-3 9",
    ),
    # Workers change stage where the dead lie unevenly, but not for the short time until the next failure; a joiner
    # takes the most-hit stage and copies it.
    ("heavy recycle", "", "-0 -4: bytes=80, copy=8, used=1-3 5-15"),
    ("heavy recycle in place", "", "-0 -4: vector=(2; 0; 0; 0)"),
    ("heavy recycle in place", "", "-0 -4 -1: bytes=0", "+1: vector=(1; 1; 0; 0), bytes=80, copy=8"),
    ("heavy recycle under many failures", "", "-0 -4: bytes=0"),
]


@pytest.mark.parametrize(("name", "alive", "steps"), [(name, alive, steps) for name, alive, *steps in SCENARIOS])
def test_results_and_costs_of_changes(name, alive, steps):
    played = Play(MAKERS[name](), alive)
    played.play(*steps)
    if name == "heavy recycle":
        assert max(played.state.vector) == 1


LAYERS = {"gradients": 1.0, "step": 0.5}
RUNS = [
    (lambda: Bamboo(scenario(3, 4, 6, layers=8, layer=LAYERS, bandwidth=4.0)), ("", "0-1 3-11", "0-9", "-2")),
    (
        partial(oobleck, layer={"gradients": 0.25, "step": 0.125, "message": 0.01}, latency=0.01),
        ("0-5", "0-6", "0-9", ""),
    ),
    (elaswave, ("", "0-4 6-7")),
    *((MAKERS[name], ("",)) for name in ("checkpoint_restart", "hot_spare", "live_migration", "job_restart")),
    (MAKERS["sample_dropping"], ("",)),
]


@pytest.mark.parametrize(("make", "lives"), RUNS)
def test_configurations_pass_check_fit_and_take_their_period(make, lives):
    for alive in lives:
        played = Play(make(), alive.removeprefix("-2"))
        played.play(*["-2: event=take over"] * (alive == "-2"))
        memory = played.system.scenario.memory or ()
        for schedule, profile in played.state.schedules():
            limit = max(memory, default=None) if played.system.name != "oobleck" else None
            assert check(lower(schedule), profile=profile, byte_limit=limit, about_to_run=True) == []
            assert simulate(lower(schedule), profile).period == pytest.approx(played.state.period)


THREE = tuple(Layer(1.0, 1.0, 1.0, static=100.0 * part, activation=float(part)) for part in (1, 2, 3))
TWO_LAYERS = scenario(2, 4, 6, layers=8, layer={"static": 10.0}, memory=(43.0,) * 4)
UNEVEN = replace(scenario(1, 3, 10), layers=THREE, memory=(1.0,) * 3)
MISFITS = [
    # Two stages and the buffers of both, of a micro-batch each or of what 1F1B holds; a single stage has no copy.
    (lambda: Bamboo(TWO_LAYERS), 44, 43, "1 pipeline(s) of 8 stages"),
    (lambda: Bamboo(UNEVEN), 200 + 10 * 2 + 300 + 10 * 3, 1, ""),
    (lambda: Bamboo(UNEVEN, buffer_per_micro_batch=False), 200 + 2 * 2 + 300 + 1 * 3, 1, ""),
    (lambda: Bamboo(replace(scenario(1, 1, 10), layers=THREE[:1], memory=(1.0,))), 100 + 10, 1, ""),
    (partial(oobleck, memory=(1.0,) * 4), 2, 1, "2 pipelines on 13 nodes have at most 6 stages each"),
    (lambda: CheckpointRestart(gridded(memory=20.5)), 24.0, 20.5, ""),
    (partial(elaswave, 15.0), 54, 15, ""),
    (lambda: ReCycle(replace(planned().scenario, memory=(1.0, 1.0, 0.5, 1.0))), 1.0, 0.5, "rank 2"),
]


@pytest.mark.parametrize(("make", "needed", "cap", "reason"), MISFITS)
def test_misfit_states_needed_and_available_bytes(make, needed, cap, reason):
    misfit = make()
    misfit = misfit.begin(misfit.scenario.all_nodes)
    assert isinstance(misfit, DoesNotFit)
    assert (misfit.needed, misfit.cap) == (needed, cap)
    assert reason in misfit.reason


def test_memory_determines_the_depth_of_pipelines():
    """Bamboo: two stages of two layers and 6 buffers of both, 20 + 20 + 6 * (2 + 2) = 64; in one pipeline, 12 buffers.
    Oobleck: stage 0 of S holds min(S, batch) activations of its 12 / S layers."""
    assert [Bamboo(replace(TWO_LAYERS, memory=(memory,) * 4)).depth for memory in (64.0, 63.0)] == [4, 8]
    assert list(oobleck().templates) == list(range(3, 11))
    assert oobleck().templates[3].split == (4, 4, 4)
    assert list(oobleck(node_of=tuple(slot // 2 for slot in range(12))).templates) == [2, 3, 4]
    assert min(oobleck(memory=(2.0,) * 4).templates) == 6
    for memory, least in ((16.0, 3), (15.0, 4)):
        assert min(oobleck(layer={"activation": 1.0}, memory=(memory,) * 4).templates) == least


def test_stash_on_the_host_costs_only_the_time_beyond_the_work(monkeypatch):
    """PCIe takes 1 byte in 1 / pcie seconds; each redundant forward overlaps F + F + B = 4 seconds of work."""
    monkeypatch.setattr(Bamboo, "pcie", 0.25)
    assert Play(bamboo()).state.period == 31
    monkeypatch.setattr(Bamboo, "pcie", 0.2)
    assert Play(bamboo()).state.period > 31


def test_micro_batch_sizes_follow_the_rates_of_pipelines():
    """Four layers a worker in place of three: (12 + 2) * 12 seconds to (12 + 3) * 9 with equal sizes."""
    played = Play(elaswave(), "0-4 6-7")
    state = played.state
    sizes = played.system.sizes(state.grid, (4, 3))
    assert sum(sizes) == pytest.approx(2)
    assert sizes[0] / sizes[1] == pytest.approx(14 * 12 / (15 * 9))
    assert (state.layout, state.samples) == ("1 x 4 + 1 x 3", played.system.scenario.samples)
    assert state.period == pytest.approx(15 * 9 * sizes[0]) == pytest.approx(14 * 12 * sizes[1])


def test_the_death_of_a_spare_of_recycle_changes_nothing():
    played = Play(ReCycle(of_job(2, 2, 4)))
    played.state = replace(
        played.state, slots={at: slot for at, slot in played.state.slots.items() if slot != 3}, vector=(0, 1)
    )
    played.play("-3: event=spare, seconds=0, loss=nothing")
