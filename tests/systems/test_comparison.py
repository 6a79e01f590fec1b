"""All systems on one trace: the books close for each, next to references, and every state obeys the protocol."""

import pytest

from recycle import Job, JobError
from recycle.systems import SYSTEMS
from recycle.systems.cluster import run
from recycle.systems.comparison import at_dead_shares, compare, references, system_names
from recycle.systems.failure_generator import Generator
from recycle.systems.scenario import Scenario
from recycle.systems.system import Change, DoesNotFit, Nodes, State, System
from tests.systems.scenarios import trace

JOB = Job.from_toml(
    "[shape]\npipelines = 4\nranks = 4\nmicro_batches = 6\n"
    "[times]\nforward = 0.1\nbackward_input = 0.1\nbackward_weight = 0.1\n[memory]\nlimit = 12\n"
)
GENERATOR = Generator(days=20, rate=400, repair_median=2, repair_p90=8, seed=3)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.slow
def test_every_second_is_booked_and_every_node_accounted_for(name):
    scenario = Scenario.of(JOB)
    system = Watched(SYSTEMS[name](scenario))
    outcome = run(system, scenario, GENERATOR.trace(scenario.nodes))
    assert outcome.samples / outcome.fault_free + sum(outcome.lost.values()) == pytest.approx(outcome.seconds)
    assert 0 < outcome.ettr < 1
    assert outcome.events
    assert system.changes > 50


class Watched:
    """A system whose every change is held against the protocol."""

    def __init__(self, system: System):
        self.system = system
        self.changes = 0
        self.name = system.name

    def begin(self, live: Nodes) -> State | DoesNotFit:
        return self.system.begin(live)

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        assert failed <= state.live
        assert not joined & state.live
        change = self.system.change(state, failed, joined)
        assert change.state.live == state.live - failed | joined
        assert min(change.pause.by_cause().values()) >= 0
        self.changes += 1
        return change


def test_references_are_fault_free_and_scaled_by_live_nodes():
    scenario = Scenario.of(JOB)
    plain, split = references(scenario)
    assert (plain.name, plain.layout, plain.samples_per_second) == ("1f1b", "4 x 4", pytest.approx(24 / 2.7))
    assert split.samples_per_second > plain.samples_per_second
    (compared,) = compare(scenario, [trace(scenario, 100.0, (50.0, "0-7"))], ["recycle"])
    assert compared.live == 0.75


def test_ratios_to_the_fault_scaled_ideal():
    scenario = Scenario.of(JOB)
    results = at_dead_shares(scenario, ["recycle", "checkpoint_restart"], shares=(0.01, 0.25))
    assert [result.dead for result in results] == [1, 4]
    plain, _ = references(scenario)
    for result in results:
        scaled = plain.samples_per_second * (1 - result.dead / 16)
        assert result.of_scaled["1f1b"]["checkpoint_restart"] == pytest.approx(24 / 3.3 / scaled)  # three pipelines
        assert result.of_scaled["1f1b"]["recycle"] > 1
        assert result.of_scaled["zero-bubble"]["recycle"] < result.of_scaled["1f1b"]["recycle"]


def test_every_system_stops_without_live_nodes():
    scenario = Scenario.of(JOB)
    for make in SYSTEMS.values():
        outcome = run(make(scenario), scenario, trace(scenario, 10_000.0, (1000.0, "0-15")))
        assert outcome.lost["stopped"] == 9000
        assert outcome.samples <= 1000 * outcome.fault_free


def test_names_of_systems():
    assert system_names("oobleck, recycle,oobleck") == ["oobleck", "recycle"]
    with pytest.raises(JobError, match="name at least one"):
        system_names(" ,")
