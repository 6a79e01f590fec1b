"""Systems on a job that shards its optimizer's state: held bytes, costs of a failure, and loss of a shard."""

import pytest

from recycle import Job, check
from recycle.systems import SYSTEMS
from recycle.systems.checkpoint_restart import HotSpare
from recycle.systems.comparison import copies_of, references
from recycle.systems.recycle import ReCycle
from recycle.systems.scenario import Scenario
from recycle.systems.system import Change, DoesNotFit, Loss
from tests.systems.scenarios import Play

HOSTS = 4
BANDWIDTH = 25e9
SPLIT = (1, 1)


def scenario(copies=2, memory="auto", per_node=1, pipelines: int = HOSTS) -> Scenario:
    """Four pipelines of two stages of a GPT of two layers, in bf16 with gradients summed in fp32."""
    sharding = f"sharded_optimizer = true\noptimizer_copies = {copies}\n" if copies else ""
    return Scenario.of(
        Job.from_toml(
            f"""
            [shape]
            pipelines = {pipelines}
            ranks = 2
            micro_batches = 8
            [times]
            profile = "analytic"
            [memory]
            limit = "{memory}"
            [model]
            layers = 2
            hidden = 1024
            heads = 16
            sequence = 1024
            vocabulary = 8192
            [cluster]
            workers_per_node = {per_node}
            [analytic]
            gpu = "A100-80GB"
            [train]
            precision = "bf16"
            accumulation = "fast"
            {sharding}
            """
        )
    )


def parameters(base: Scenario) -> list[float]:
    """Parameters of each of the two stages, from 14 bytes of state of an unsharded host."""
    return [state / 14 for state in base.with_copies(0).state_per_stage(SPLIT)]


def test_bytes_of_a_layer_depend_on_its_hosts():
    base = scenario()
    for hosts in (1, 2, 4, 8):
        shared = min(2, hosts) / hosts
        static = [sum(layer.static for layer in stage) for stage in base.stages(SPLIT, hosts)]
        assert static == pytest.approx([(2 + 4 + 12 * shared) * n for n in parameters(base)], rel=1e-12)
        profile = base.profile(SPLIT, hosts)
        leaves = (hosts - 1 + min(2, hosts) - 1) / hosts
        turns = (hosts - 1) * base.job.analytic.link_latency
        assert profile.reduce == pytest.approx([turns + 4 * leaves * n / BANDWIDTH for n in parameters(base)])
        assert profile.gather == pytest.approx([turns + 2 * (1 - shared) * n / BANDWIDTH for n in parameters(base)])
    priced = base.job.prices
    assert (priced.reduce, priced.gather) == (base.profile(SPLIT, HOSTS).reduce, base.profile(SPLIT, HOSTS).gather)
    assert base.state == pytest.approx(14 * sum(parameters(base)))


def test_optimizer_copies_of_each_system():
    held = {name: copies_of(system(scenario(copies=3))) for name, system in SYSTEMS.items()}
    assert held == {
        **{"recycle": 3, "hot_spare": 3, "live_migration": 3, "job_restart": 3, "checkpoint_restart": 1, "elaswave": 1},
        **{"recycle_elastic": 0, "oobleck": 0, "bamboo": 0, "sample_dropping": 0},
    }
    assert {copies_of(system(scenario(copies=0))) for system in SYSTEMS.values()} == {0}


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "bamboo"])
def test_schedules_of_sharding_systems_are_valid_and_gather(name):
    base = scenario()
    system = SYSTEMS[name](base)
    for schedule, profile in Play(system).state.schedules():
        assert check(schedule, profile=profile) == []
        assert schedule.gathers == (copies_of(system) > 0)


def test_job_fits_only_with_a_sharded_optimizer():
    """18 bytes of a parameter on every host, 6 + 24 / 4 of two copies, 6 + 12 / 4 of one."""
    base = scenario()
    needed = 10.5 * parameters(base)[0] + 2 * base.stages(SPLIT)[0][0].activation
    limit = f"{needed / 2**20:.0f} MiB"
    fits = {
        name: not isinstance(SYSTEMS[name](scenario(memory=limit)).begin(base.all_nodes), DoesNotFit)
        for name in ("checkpoint_restart", "sample_dropping")
    }
    assert fits == {"checkpoint_restart": True, "sample_dropping": False}
    assert references(scenario(memory=limit))[0].samples_per_second > 0
    assert references(scenario(copies=0, memory=limit))[0].samples_per_second == 0


def struck(base: Scenario, *pipelines: int) -> tuple[Scenario, Change]:
    """ReCycle after the workers of the last rank of these pipelines have died at once."""
    played = Play(ReCycle(base, move=False))
    base, last = played.system.scenario, played.system.scenario.shape.ranks - 1
    dead = (
        base.node_of[slot] for at, slot in played.state.slots.items() if at.pipeline in pipelines and at.rank == last
    )
    return base, played.change(" ".join(map(str, dead)))


def test_failure_restores_the_copies_of_the_dead_host():
    after, change = struck(scenario(), 1)
    stage = sum(parameters(scenario())) if after.shape.ranks == 1 else parameters(scenario())[-1]
    owned = 12 * stage * 2 / after.shape.pipelines
    assert (change.loss, change.event) == (Loss.ITERATION, "re-route")
    assert change.bytes == pytest.approx(owned)
    assert change.pause.copy == pytest.approx(owned / 2 / BANDWIDTH + after.latency)
    assert struck(scenario(copies=0), 1)[1].pause.copy == 0.0


@pytest.mark.parametrize(
    ("copies", "dead", "recycle", "spare"),
    [
        (2, (1,), Loss.ITERATION, Loss.ITERATION),
        (2, (1, 2), Loss.CHECKPOINT, Loss.CHECKPOINT),
        (2, (1, 3), Loss.ITERATION, Loss.CHECKPOINT),
        (3, (1, 2), Loss.ITERATION, Loss.ITERATION),
        (1, (1,), Loss.CHECKPOINT, Loss.CHECKPOINT),
        (0, (1, 2), Loss.ITERATION, None),
    ],
)
def test_loss_of_all_owners_restores_a_checkpoint(copies, dead, recycle, spare):
    """A spare replaces a dead worker if owners remain; of three pipelines with two spares the first ones die."""
    assert struck(scenario(copies=copies), *dead)[1].loss is recycle
    if spare is not None:
        played = Play(HotSpare(scenario(copies=copies), spares=2))
        first = played.state.used[:: played.state.grid.ranks]
        assert len(first) > len(dead)
        assert played.change(" ".join(map(str, first[: len(dead)]))).loss is spare


def test_owners_of_a_shard_share_no_node():
    base = scenario(per_node=2)
    together = [slot for slot, node in enumerate(base.node_of) if node == 0]
    apart = [slot for slot, node in enumerate(base.node_of) if node == 1]
    assert not base.loses_shard([*together, *apart], together)
    assert base.loses_shard([*together, *apart], [*together, apart[0]])
