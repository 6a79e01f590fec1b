"""Units and shards of a stage: norms, steps and names of shards; units that stay while the model is repartitioned."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch

from recycle import Job, JobError, Worker
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage, copy_state, digest
from recycle.exec.model.state.accumulate import ExactSum, FlatLayout
from recycle.exec.model.state.gradient_sums import JoinedSums, PartialSum
from recycle.exec.model.state.layouts import ShardedOptimizer, Shards, ends_of_units
from recycle.exec.model.state.optimizer import StateNames, StoredNames, UnitOptimizer
from recycle.exec.model.state.rules import rules_of
from recycle.exec.model.weights import units_of
from recycle.exec.protocol import Commit
from recycle.exec.worker.local_stages import LocalStages
from recycle.exec.worker.step_state import StepState
from recycle.job.sections import TrainSection
from tests.exec.drive import execute, micro_batches, one_f_one_b
from tests.exec.runs import job
from tests.exec.sharded import joined, require_equal

CPU = torch.device("cpu")
SHAPES = [torch.Size([300, 200]), torch.Size([50, 1000]), torch.Size([7, 3]), torch.Size([1000]), torch.Size([3])]
NAMES = ["wide", "gated", "small", "norm", "bias"]
UNIT_ORDER = ["gated", "bias", "norm", "wide", "small"]
TRAIN = TrainSection(weight_decay=0.1, warmup=1)
DIVISOR = 4
GATED = StoredNames({}, {"gated"})


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in zip(NAMES, SHAPES, strict=True)
    }


def summed(order: Sequence[str] = NAMES) -> ExactSum:
    """The same gradients, in sums that lie in this order."""
    sums = ExactSum(FlatLayout([SHAPES[NAMES.index(name)] for name in order]), DIVISOR, 6, CPU)
    generator = torch.Generator().manual_seed(5)
    for name, shape in zip(NAMES, SHAPES, strict=True):
        sums.add(order.index(name), torch.randn(shape, generator=generator))
    return sums


def sharded(sums: ExactSum, count: int, working: torch.dtype = torch.float32) -> Shards:
    ends = [0, sums.layout.size]
    return ShardedOptimizer(
        parameters(),
        GATED,
        JoinedSums([PartialSum(sums)], DIVISOR),
        rules_of(TRAIN, parameters()),
        working,
        10,
        count,
        ends,
    )


def in_one_piece(sums: ExactSum, working: torch.dtype) -> UnitOptimizer:
    whole = UnitOptimizer(parameters(), rules_of(TRAIN, parameters()), working)
    mean = JoinedSums([PartialSum(sums)], DIVISOR).mean
    whole.attach(mean, 0, torch.empty_like(whole.parameters), StateNames({}, {}))
    return whole


def named_state(whole: UnitOptimizer) -> dict[str, torch.Tensor]:
    """The state of all parameters, in the order of `NAMES`, the halves of the gated one apart."""
    counts, shaped = whole.state_tensors()[3], [*whole.state_tensors()[:3], *whole.state_tensors()[4:]]
    state = {f"step.{name}": counts[place : place + 1] for name, place in zip(NAMES, (0, 0, 0, 1, 1), strict=True)}
    for prefix, flat in zip(("", "exp_avg.", "exp_avg_sq.", "rounded."), shaped, strict=False):
        state |= {f"{prefix}{name}": view for name, view in zip(NAMES, whole.layout.views(flat), strict=True)}
        both = state.pop(f"{prefix}gated").chunk(2)
        state |= {f"{prefix}gated{half}": part for half, part in zip((".gate", ".up"), both, strict=True)}
    return state


def norms_of(shards: Shards) -> list[list[float]]:
    return [norms for _, norms, _, _ in shards.reduced(None)]


def digests_of(shards: Shards) -> dict[int, str]:
    return {number: digest(tensors) for number, (tensors, _) in shards.parts(None).items()}


def by_unit(sums: ExactSum, working: torch.dtype) -> Shards:
    """Shards of three units, one without parameters; in the last one the decayed parameters come last."""
    joined_sums = JoinedSums([PartialSum(sums)], DIVISOR)
    ends = ends_of_units(range(4, 7), [4, 4, 6, 6, 6], joined_sums.layout)
    cuts = [0, *(end for _, end in ends.values())]
    ordered = {name: parameters()[name] for name in UNIT_ORDER}
    shards = ShardedOptimizer(ordered, GATED, joined_sums, rules_of(TRAIN, parameters()), working, 12, 3, cuts)
    assert shards.all_numbers == range(12, 21)
    sizes = [len(part) for part in shards.weights()]
    assert [sum(sizes[unit : unit + 3]) for unit in (0, 3, 6)] == [50_112, 0, 61_120]
    return shards


@pytest.mark.parametrize("working", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_units", [False, True])
def test_shards_have_the_norms_and_bits_of_the_whole(has_units, working):
    sums = summed(UNIT_ORDER if has_units else NAMES)
    whole = in_one_piece(summed(), working)
    shards = by_unit(sums, working) if has_units else sharded(sums, 3, working)
    shards.own(shards.all_numbers)
    shards.settled()
    terms = sorted(norm for norms in norms_of(shards) for norm in norms)
    assert terms == sorted(summed().mean_norms_squared(DIVISOR))
    for iteration in range(3):
        before, digests = [tensor.clone() for tensor in shards.state_tensors()], digests_of(shards)
        whole.step(iteration, 0.5)
        for piece in shards.pieces.values():
            piece.step(iteration, 0.5)
    require_equal(joined([shards.named_state(shards.state_tensors())]), joined([named_state(whole)]))
    live = torch.cat(shards.weights())
    copy_state(shards.state_tensors(), before)
    assert digests_of(shards) == digests
    shards.publish()
    assert not torch.equal(live, torch.cat(shards.weights()))
    sums.buffer[-64] = math.nan
    assert [all(map(math.isfinite, norms)) for norms in norms_of(shards)] == [True] * (len(shards.pieces) - 1) + [False]


def test_only_owned_shards_are_held():
    shards = sharded(summed(), 4, torch.bfloat16)
    shards.own([11, 12])
    assert list(shards.pieces) == [11, 12]
    elements = sum(len(shards.weights()[place]) for place in (1, 2))
    counted = sum(tensor.numel() for tensor in shards.state_tensors() if tensor.numel() > 2)
    assert counted == 3 * elements, "fp32 parameters and two moments"
    masters = shards.pieces[11].state_tensors()[0]  # held on to, so that its memory is not what the next one gets
    assert bool(masters.any())
    shards.keep_only([12])
    assert list(shards.pieces) == [12]
    shards.settled()
    shards.own([11])
    assert not torch.equal(shards.pieces[11].state_tensors()[0], masters), "it is to come from an owner"


KINDS = {
    "gpt": {},
    "tied": {"kind": "gpt", "tied": True},
    "llama": {"kind": "llama", "ffn": 48},
    "emulated": {"kind": "emulated"},
    "bf16": {},
    "muon": {},
}
TRAINED = {"bf16": {"precision": "bf16"}, "muon": {"optimizer": "muon"}}


def job_of(name: str) -> Job:
    model = {"kind": "gpt", "layers": 4, "hidden": 32, "heads": 2, "sequence": 16, **KINDS[name]}
    return job(1, 2, 2, model=model, train=TRAINED.get(name, {}))


def iterate(stages: Mapping[int, Stage], step: int) -> list[float]:
    """One iteration and its step on one worker that hosts the whole model; the norms."""
    batches = micro_batches(0, 2)
    for stage in stages.values():
        stage.begin_iteration(step)
    execute((stage, one_f_one_b(stage.index, len(stages), batches)) for stage in stages.values())
    norms = [norm for stage in stages.values() for norm in stage.gradient_norms_squared()]
    updates = StepState(stages, step - 1)
    updates.mark_reduced(step)
    updates.roll_to(step, Commit(step, 0.0, 0.0, 0.5))
    return norms


def named(stages: Mapping[int, Stage]) -> dict[str, torch.Tensor]:
    return {
        f"{stage.index == max(stages)} {name}" if "word_embeddings" in name else name: tensor.clone()
        for stage in stages.values()
        for name, tensor in stage.named_state(stage.state_tensors()).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_repartitioning_between_steps_keeps_the_bits(name):
    tested_job = job_of(name)

    still, moved = (LocalStages(Worker(0, 0), partial(build_stages, tested_job), (), [0, 1]) for _ in range(2))
    for step, cut in enumerate([(), (1, 1, 2), (3, 1), ()]):
        tensors = {id(t): t.data_ptr() for s in moved.stages.values() for t in s.state_tensors()}
        if cut or step:
            assert moved.place(cut, range(len(cut) or 2))
            assert moved.missing() == set()
            moved.confirm()
            assert {id(t): t.data_ptr() for s in moved.stages.values() for t in s.state_tensors()} == tensors
        assert math.fsum(iterate(moved.stages, step)) == math.fsum(iterate(still.stages, step))
    moved_state, expected = named(moved.stages), named(still.stages)
    assert moved_state.keys() == expected.keys()
    assert all(torch.equal(moved_state[key], expected[key]) for key in moved_state)


def test_worker_keeps_units_until_new_stages_are_confirmed():
    tested_job = job_of("emulated")

    hosted = LocalStages(Worker(0, 0), partial(build_stages, tested_job), (), [0])
    assert not hosted.restore_confirmed()
    given, kept = hosted.layout, [tensor.clone() for tensor in hosted.tensors_to_send(0, 3)]
    assert hosted.place((1, 3), [1])
    assert not hosted.place((1, 3), [1])
    assert hosted.missing() == {3, 4, 5}
    assert not hosted.is_confirmed
    assert all(torch.equal(tensor, other) for tensor, other in zip(hosted.tensors_to_send(0, 3), kept, strict=True))
    for tensor in hosted.tensors_to_receive(3, 6):
        tensor.fill_(7.0)
    assert hosted.restore_confirmed()  # the generation came to nothing
    assert (hosted.layout, hosted.missing(), hosted.is_confirmed) == (given, set(), True)
    assert all(torch.equal(tensor, other) for tensor, other in zip(hosted.tensors_to_receive(0, 3), kept, strict=True))
    assert hosted.place((1, 3), [1])
    hosted.confirm()
    assert [tensor[0].item() for tensor in hosted.tensors_to_send(3, 5)[::2]] != [7.0, 7.0]
    with pytest.raises(Exception, match="unit 0 of the model"):
        hosted.tensors_to_send(0, 1)


def test_parameters_outside_of_layers_belong_to_the_ends():
    names = ["embedding.weight", "decoder.layers.0.w", "decoder.layers.1.w", "decoder.norm", "output_layer.weight"]
    assert units_of(names, [2], 0) == dict(zip(names, (0, 1, 2, 3, 3), strict=True))
    assert units_of(["embedding.weight", "layers.0.w", "scale"], [1, 1], 0)["scale"] == 0
    assert units_of(["embedding.weight", "layers.1.w"], [1, 1], 1)["embedding.weight"] == 3
    assert units_of(["scale"], [4, 2, 2], 1) == {"scale": 5}
    with pytest.raises(JobError, match="without layers"):
        units_of(["scale"], [4, 0, 4], 1)
