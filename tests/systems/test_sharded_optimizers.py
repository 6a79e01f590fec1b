"""Systems on a job that shards its optimizer's state: what they hold, what a death costs them, when all is lost."""

from __future__ import annotations

import pytest

from recycle.ir.check import check
from recycle.job import Job
from recycle.systems import SYSTEMS
from recycle.systems.checkpoint_restart import HotSpare
from recycle.systems.comparison import copies_of, references
from recycle.systems.recycle import ReCycle
from recycle.systems.setting import Setting
from recycle.systems.system import Change, DoesNotFit, Loss
from tests.systems.settings import Play

HOSTS = 4
BANDWIDTH = 25e9
SPLIT = (1, 1)


def setting(copies: int = 2, memory: str = "auto", per_node: int = 1, pipelines: int = HOSTS) -> Setting:
    """Four pipelines of two stages of a GPT of two layers, in bf16 with gradients summed in fp32."""
    sharding = f"sharded_optimizer = true\noptimizer_copies = {copies}\n" if copies else ""
    return Setting.of(
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


def parameters(of: Setting) -> list[float]:
    """Of each of the two stages: what an unsharded host holds 14 bytes of state of."""
    return [state / 14 for state in of.with_copies(0).state_per_stage(SPLIT)]


def test_what_a_layer_weighs_follows_from_its_hosts() -> None:
    of = setting()
    for hosts in (1, 2, 4, 8):
        shared = min(2, hosts) / hosts
        found = [sum(layer.static for layer in stage) for stage in of.stages(SPLIT, hosts)]
        assert found == pytest.approx([(2 + 4 + 12 * shared) * n for n in parameters(of)], rel=1e-12)
        profile = of.profile(SPLIT, hosts)
        leaves = (hosts - 1 + min(2, hosts) - 1) / hosts
        turns = (hosts - 1) * of.job.analytic.link_latency
        assert profile.reduce == pytest.approx([turns + 4 * leaves * n / BANDWIDTH for n in parameters(of)])
        assert profile.gather == pytest.approx([turns + 2 * (1 - shared) * n / BANDWIDTH for n in parameters(of)])
    priced = of.job.prices
    assert (priced.reduce, priced.gather) == (of.profile(SPLIT, HOSTS).reduce, of.profile(SPLIT, HOSTS).gather)
    assert of.state == pytest.approx(14 * sum(parameters(of)))


def test_each_system_shards_as_it_is_known_to() -> None:
    held = {name: copies_of(system(setting(copies=3))) for name, system in SYSTEMS.items()}
    assert held == {
        **{"recycle": 3, "hot_spare": 3, "live_migration": 3, "checkpoint_restart": 1, "elaswave": 1},
        **{"recycle_elastic": 0, "oobleck": 0, "bamboo": 0, "sample_dropping": 0},
    }
    assert {copies_of(system(setting(copies=0))) for system in SYSTEMS.values()} == {0}


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "bamboo"])
def test_every_system_runs_valid_schedules_which_gather_where_it_shards(name: str) -> None:
    of = setting()
    system = SYSTEMS[name](of)
    for schedule, profile in Play(system).state.schedules():
        assert check(schedule, profile=profile) == []
        assert schedule.gathers == (copies_of(system) > 0)


def test_what_is_freed_makes_a_job_fit() -> None:
    """18 bytes of a parameter on every host, 6 + 24 / 4 of two copies, 6 + 12 / 4 of one."""
    of = setting()
    needed = 10.5 * parameters(of)[0] + 2 * of.stages(SPLIT)[0][0].activation
    limit = f"{needed / 2**20:.0f} MiB"
    fits = {
        name: not isinstance(SYSTEMS[name](setting(memory=limit)).begin(of.all_nodes), DoesNotFit)
        for name in ("checkpoint_restart", "sample_dropping")
    }
    assert fits == {"checkpoint_restart": True, "sample_dropping": False}
    assert references(setting(memory=limit))[0].samples_per_second > 0
    assert references(setting(copies=0, memory=limit))[0].samples_per_second == 0


def struck(of: Setting, *pipelines: int) -> tuple[Setting, Change]:
    """ReCycle after the workers of the last rank of these pipelines have died at once."""
    played = Play(ReCycle(of, move=False))
    of, last = played.system.setting, played.system.setting.shape.ranks - 1
    dead = (of.node_of[slot] for at, slot in played.state.slots.items() if at.pipeline in pipelines and at.rank == last)
    return of, played.change(" ".join(map(str, dead)))


def test_a_death_costs_the_copies_that_the_dead_host_had() -> None:
    of, change = struck(setting(), 1)
    stage = sum(parameters(setting())) if of.shape.ranks == 1 else parameters(setting())[-1]
    owned = 12 * stage * 2 / of.shape.pipelines
    assert (change.loss, change.event) == (Loss.ITERATION, "re-route")
    assert change.bytes == pytest.approx(owned)
    assert change.pause.copy == pytest.approx(owned / 2 / BANDWIDTH + of.latency)
    assert struck(setting(copies=0), 1)[1].pause.copy == 0.0


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
def test_the_last_owners_of_a_shard_send_everybody_back(
    copies: int, dead: tuple[int, ...], recycle: Loss, spare: Loss | None
) -> None:
    """A spare replaces whoever leaves owners behind; of the three pipelines beside two spares the first ones die."""
    assert struck(setting(copies=copies), *dead)[1].loss is recycle
    if spare is not None:
        played = Play(HotSpare(setting(copies=copies), spares=2))
        first = played.state.used[:: played.state.grid.ranks]
        assert len(first) > len(dead)
        assert played.change(" ".join(map(str, first[: len(dead)]))).loss is spare


def test_owners_share_no_node_so_that_a_node_may_die() -> None:
    of = setting(per_node=2)
    together = [slot for slot, node in enumerate(of.node_of) if node == 0]
    apart = [slot for slot, node in enumerate(of.node_of) if node == 1]
    assert not of.loses_shard([*together, *apart], together)
    assert of.loses_shard([*together, *apart], [*together, apart[0]])
