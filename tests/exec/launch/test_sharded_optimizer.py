"""Runs whose optimizer state is sharded: the bits of runs where every host has all of it, through deaths too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recycle.errors import ScheduleError
from recycle.exec.checkpoint.checkpoint import load
from recycle.exec.launch.standalone import LocalRun
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage
from recycle.exec.model.stored_tensors import piece_of
from recycle.ir.families import interleaved, one_f_one_b, zb_h1, zb_v
from recycle.ir.lower import with_barrier
from recycle.job import PricedJob
from recycle.plans.plan import with_updates_of
from tests.exec.launch.test_optimizers import MIXED_OPTIMIZERS
from tests.exec.runs import calm_run, figures, job, kinds, of_kind, varied
from tests.exec.sharded import names_in, require_calm, require_equal, sharded, state_of

STEPS = 3
"""Runs with the same calm run."""


def weights(stage: Stage) -> list[torch.Tensor]:
    named = getattr(stage, "parameters", None)
    return [torch.cat(stage.layout.weights())] if named is None else [named[name].detach() for name in sorted(named)]


GPT = {"kind": "gpt", "model": {"hidden": 64, "layers": 4}, "train": {"clip": 0.5}}
TIED = {"kind": "gpt", "model": {"hidden": 64, "layers": 4, "tied": True}, "memory": {"limit": 8}}
LLAMA = {**GPT, "kind": "llama"}
CHUNKS = {"shape": {"chunks": 2}, "memory": {"limit": 8}, "model": {"layers": 8}}
ELASTIC = {"planner": {"layout": "elastic"}}


def buckets(count: int, accumulation="exact"):
    return {"train": {"accumulation": accumulation, "clip": 0.5, "reduce_buckets": count}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipelines", "ranks", "copies", "sections"),
    [
        (3, 2, 2, {**GPT, "train": MIXED_OPTIMIZERS} | ELASTIC),
        (4, 2, 2, {**LLAMA, "train": {"clip": 0.5, "precision": "bf16"}}),
        (3, 2, 2, {}),
        (3, 2, 2, CHUNKS),
        # The shared weight is on two stages: of two workers, or of one worker that has both ends of the model.
        (3, 2, 2, TIED | buckets(3) | {"shape": {"chunks": 2}}),
        (3, 2, 2, TIED | buckets(2) | ELASTIC),
        (3, 1, 2, TIED | buckets(1)),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (
                (3, 2, 1, {**GPT, "train": {"clip": 0.5, "precision": "bf16"}}),
                (4, 2, 3, GPT),
                (3, 2, 2, TIED | buckets(4, "fast")),
                (3, 2, 2, TIED | buckets(3) | ELASTIC | {"shape": {"chunks": 2}}),
            )
        ),
    ],
)
def test_sharded_state_trains_to_the_bits_of_whole_state(pipelines, ranks, copies, sections):
    config = job(pipelines, ranks, 2, **sections)
    schedule = (
        (zb_v if config.model.tied else interleaved)(config.shape) if config.shape.chunks > 1 else zb_h1(config.shape)
    )
    runs = [LocalRun(with_barrier(with_updates_of(schedule, each)), each) for each in (config, sharded(config, copies))]
    (whole, wanted), (parts, result) = ((run, run.run(STEPS)) for run in runs)
    if config.train.accumulation == "fast":  # sums depend on the order of hosts
        assert result.losses == pytest.approx(wanted.losses, rel=1e-6)
        return
    assert figures(result) == figures(wanted)
    require_equal(state_of(parts), state_of(whole))
    for worker, stages in parts.stages.items():
        for index, stage in stages.items():
            for own, other in zip(weights(stage), weights(whole.stages[worker][index]), strict=True):
                assert torch.equal(own, other)


# Between processes

FAULTY = 8
MEMBERSHIP = {"heartbeat": 0.1, "dead_after": 3.0}


EMULATED = job(3, 2, 2, train={"clip": 1e9, "checkpoint_every": 4}, membership=MEMBERSHIP)
"""Steps are staggered from the second iteration on; state is kept every fourth step."""


def test_last_hosts_own_all_shards_until_a_rejoin(launch):
    faults = ("kill:0.0@2", "kill:1.0@4", "rejoin:0.0@6")
    result = launch(sharded(EMULATED), FAULTY, *faults)
    require_calm(result, EMULATED)
    assert all(event["shards"] and event["bytes"] > 0 for event in of_kind(result, "moved"))
    reported = [event["further_deaths"] for event in of_kind(result, "shards")]
    assert reported == [[1, 1], [0, 1], [1, 1], [0, 1], [1, 1]], "survivors copy while training continues"


def test_run_resumed_with_shards_survives_two_simultaneous_deaths(launch):
    """Of four hosts 0 and 2 have no shard in common."""
    config = job(4, 1, 2, train={"clip": 1e9, "checkpoint_every": 4}, membership=MEMBERSHIP)
    begun = launch(config, FAULTY // 2)
    result = launch(
        sharded(config), FAULTY, "kill:0.0@6.gather", "kill:2.0@6.step", directory=Path(begun.directory), resume=True
    )
    assert figures(result)[-FAULTY // 2 :] == figures(calm_run(config, launch, FAULTY))[-FAULTY // 2 :]
    assert of_kind(result, "shards")[0]["further_deaths"] == [1]
    assert result.metrics[-1]["live_workers"] == 2
    restored = [event["checkpoint"] for event in of_kind(result, "restored")]
    assert restored == ["step-00000003"], "only the start of the run reads a checkpoint"


def test_a_shard_without_an_owner_comes_from_the_checkpoint(launch):
    alone = sharded(EMULATED, copies=1)
    begun = launch(alone, FAULTY // 2)
    # The checkpoint of step 3 is complete before step 5 begins, since the run had ended with it.
    result = launch(alone, FAULTY, "kill:1.1@5", directory=Path(begun.directory), resume=True)
    require_calm(result, EMULATED)
    assert "step-00000003" in {event["checkpoint"] for event in of_kind(result, "restored")}
    assert {tuple(event["further_deaths"]) for event in of_kind(result, "shards")} == {(0, 0)}
    assert any("optimizer_copies = 1" in event["message"] for event in of_kind(result, "warning"))


@pytest.mark.slow
def test_tensor_ranks_shard_what_each_of_them_has(launch):
    """Matrices have several blocks on each tensor rank, so that shards end inside of them."""
    sections = {"model": {"hidden": 192, "layers": 1}, "membership": MEMBERSHIP}
    train, parted = {"clip": 1e9, "checkpoint_every": 3}, {"tensor_parallel": 2}
    config = job(3, 1, 2, kind="gpt", shape=parted, train=train, **sections)
    wanted = launch(config, 4)
    sharded_run = launch(sharded(config), 4, "kill:1.0t1@2.reduce")
    assert figures(sharded_run) == figures(wanted)
    folders = [Path(result.directory) / "checkpoints/step-00000003" for result in (sharded_run, wanted)]
    names = {piece for path in folders[0].glob("*.safetensors") for piece in names_in(path) if piece_of(piece)}
    assert any("-of-2.elements-" in name for name in names), "parts of tensor ranks are cut"
    digests = []
    for folder in folders:
        stages = build_stages(varied(config, grid={"tensor_parallel": 1}), [0], torch.device("cpu"))
        load(folder, stages.values())
        digests.append(stages[0].digests())
    assert digests[0] == digests[1]


def test_a_schedule_that_gathers_wants_such_a_job():
    config = job(2, 2, 2)
    with pytest.raises(ScheduleError, match="the schedule gathers parameters"):
        with_updates_of(replace(one_f_one_b(config.shape), gathers=True), config)


# Background copies in pieces over several iterations.

COPY_STEPS = 14
PIECE = 49152
"""Bytes of a piece: a shard of the models here takes several iterations."""


def gpt(pipelines: int, precision: str) -> PricedJob:
    train = {"clip": 1e9, "checkpoint_every": COPY_STEPS, "precision": precision}
    return job(pipelines, 1, 2, kind="gpt", train=train, model={"hidden": 64, "layers": 1}, membership=MEMBERSHIP)


def in_pieces(config: PricedJob, copies: int) -> PricedJob:
    return varied(sharded(config, copies), train={"copy_bytes": PIECE})


@pytest.mark.slow
def test_copies_come_in_pieces_and_then_the_stage_bears_another_death(launch):
    config = gpt(3, "fp32")
    result = launch(in_pieces(config, 2), COPY_STEPS, "kill:1.0@1.forward", "kill:0.0@12.step")
    require_calm(result, config)
    assert "restored" not in kinds(result)
    reported = [(event["step"], event["further_deaths"]) for event in of_kind(result, "shards")]
    assert [deaths for _, deaths in reported] == [[1], [0], [1], [0]]
    moved = [event for event in of_kind(result, "moved") if event["step"] < 12]
    assert {(event["worker"], event["source"]) for event in moved} == {("0.0", "2.0"), ("2.0", "0.0")}
    assert all(event["while_running"] for event in moved)
    pieces = max(event["bytes"] for event in moved) / PIECE
    assert pieces > 3
    restored = reported[2][0]
    assert 1 + int(pieces) <= restored < 12


@pytest.mark.parametrize(
    "faults",
    [
        ("kill:1.0@1", "kill:2.0@3.copy"),
        *(
            pytest.param(each, marks=pytest.mark.soak)
            for each in (
                ("kill:1.0@1", "stop:0.0@2.reduce"),
                ("kill:1.0@1", "rejoin:1.0@3", "kill:0.0@4", "kill:2.0@6.copy"),
                ("kill:1.0@1", "kill:2.0@2.copy", "rejoin:2.0@6", "rejoin:1.0@8", "kill:3.0@9"),
            )
        ),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.soak)])
@pytest.mark.slow
def test_death_of_source_or_target_restarts_the_copy_without_changing_bits(precision, faults, launch):
    config = gpt(4, precision)
    result = launch(in_pieces(config, 3), COPY_STEPS, *faults)
    require_calm(result, config)
    assert "restored" not in kinds(result)
    reported = [event["further_deaths"] for event in of_kind(result, "shards")]
    assert reported[0] == [2]
    assert reported[1] == [1]
