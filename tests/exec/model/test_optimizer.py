"""Sums of gradients, exact in any order, and AdamW on flat parameters."""

import math
from dataclasses import replace

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from msgspec.structs import replace as replace_keys

from recycle import Job, JobError
from recycle.exec.model.state import optimizer as module
from recycle.exec.model.state.accumulate import ExactSum, FastSum, FlatLayout, grid_exponent
from recycle.exec.model.state.learning_rate import learning_rate
from recycle.exec.model.state.optimizer import Mean, StateNames, StoredNames, UnitOptimizer
from recycle.exec.model.state.rules import ROW_BLOCKS, rules_of
from recycle.job.footprint import ON_CPU
from recycle.job.sections import GroupSection, TrainSection

NO_NAMES = StateNames({}, {})
TRAIN = TrainSection(steps=30, warmup=10, learning_rate=1e-3, weight_decay=0.1)
SHAPES = [torch.Size(shape) for shape in [(5, 7), (3, 4), (7,), (9,)]]
NAMES = ["layers.0.mlp.weight", "embedding.weight", "layers.0.norm.weight", "bias"]


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def unit(
    held: list[torch.nn.Parameter], working_type: torch.dtype = torch.float32, train: TrainSection = TRAIN
) -> UnitOptimizer:
    named = dict(zip(NAMES, held, strict=True))
    return UnitOptimizer(named, rules_of(train, named), working_type)


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def step(optimizer: UnitOptimizer, iteration: int, clip_factor: float):
    """One update with the gradients of an iteration."""
    flat = torch.zeros(optimizer.layout.size)
    for view, gradient in zip(optimizer.layout.views(flat), gradients(iteration), strict=True):
        view.copy_(gradient)
    attach(optimizer, lambda start, out: out.copy_(flat[start : start + len(out)]))
    optimizer.step(iteration, clip_factor)


def attach(optimizer: UnitOptimizer, mean: Mean, names: StateNames = NO_NAMES):
    optimizer.attach(mean, 0, torch.empty_like(optimizer.parameters), names)


def test_the_learning_rate_warms_up_linearly_then_falls_to_a_tenth():
    rates = [learning_rate(TRAIN, iteration) for iteration in range(40)]
    assert rates[:11] == pytest.approx([1e-4 * (place + 1) for place in range(10)] + [1e-3])
    assert rates[10:30] == sorted(rates[10:30], reverse=True)
    assert rates[29] == pytest.approx(1e-4)
    assert rates[29:] == [rates[29]] * 11
    # Half way between iterations 10 and 29.
    assert learning_rate(TRAIN, 19) + learning_rate(TRAIN, 20) == pytest.approx(1.1e-3)


def step_plain(reference: torch.optim.Optimizer, plain: list[torch.nn.Parameter], iteration: int):
    """One update of torch's optimizer, with the gradients and the rate that `step` uses."""
    for parameter, gradient in zip(plain, gradients(iteration), strict=True):
        parameter.grad = gradient * 0.5
    for group in reference.param_groups:
        group["lr"] = learning_rate(TRAIN, iteration) * group.get("scale", 1.0)
    reference.step()


GROUPS = [
    GroupSection(["layers.?.mlp.*"], learning_rate_scale=0.25, weight_decay=0.0),
    GroupSection(["*.norm.*", "*.mlp.*"], weight_decay=0.3),
    GroupSection(["bias"], learning_rate_scale=3.0),
]
BETAS = TRAIN.beta1, TRAIN.beta2
SCALED = {"adjust_lr_fn": "match_rms_adamw", "momentum": TRAIN.momentum}


def adamw(*groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(groups), betas=BETAS, eps=TRAIN.epsilon, fused=True)


@pytest.mark.parametrize(
    ("keys", "references"),
    [
        (
            {},
            lambda mlp, embedding, norm, bias: [
                adamw({"params": [mlp, embedding], "weight_decay": 0.1}, {"params": [norm, bias], "weight_decay": 0.0})
            ],
        ),
        (
            {"groups": GROUPS},
            lambda mlp, embedding, norm, bias: [
                adamw(
                    {"params": [mlp], "scale": 0.25, "weight_decay": 0.0},
                    {"params": [embedding], "weight_decay": 0.1},
                    {"params": [norm], "weight_decay": 0.3},
                    {"params": [bias], "scale": 3.0, "weight_decay": 0.0},
                )
            ],
        ),
        (
            {"optimizer": "muon"},
            lambda mlp, embedding, norm, bias: [
                torch.optim.Muon([mlp], weight_decay=0.1, **SCALED),
                adamw({"params": [embedding], "weight_decay": 0.1}, {"params": [norm, bias], "weight_decay": 0.0}),
            ],
        ),
        (
            {"groups": [GroupSection(["*"], optimizer="muon", learning_rate_scale=2.0, weight_decay=0.2)]},
            lambda mlp, *others: [
                torch.optim.Muon([{"params": [mlp], "scale": 2.0}], weight_decay=0.2, **SCALED),
                adamw({"params": others, "scale": 2.0, "weight_decay": 0.2}),
            ],
        ),
        (
            {"optimizer": "sgd", "groups": [GroupSection(["embedding.*"], optimizer="adamw")]},
            lambda mlp, embedding, norm, bias: [
                torch.optim.SGD(
                    [{"params": [mlp], "weight_decay": 0.1}, {"params": [norm, bias]}],
                    momentum=TRAIN.momentum,
                    foreach=False,
                ),
                adamw({"params": [embedding], "weight_decay": 0.1}),
            ],
        ),
    ],
    ids=["adamw", "groups", "muon", "groups of muon", "sgd"],
)
def test_groups_and_other_optimizers_have_the_bits_of_torchs(keys, references):
    train = replace_keys(TRAIN, **keys)
    optimizer, plain = unit(held := parameters(), train=train), parameters()
    others = references(*plain)
    for iteration in range(5):
        step(optimizer, iteration, 0.5)
        for reference in others:
            step_plain(reference, plain, iteration)
    assert [name for name, own, other in zip(NAMES, held, plain, strict=True) if not torch.equal(own, other)] == []
    counts = next(tensor for tensor in optimizer.state_tensors() if tensor.numel() == 2)
    assert counts.tolist() == [5.0, 5.0]


@pytest.mark.parametrize(("groups", "rows"), [(2, (2, 1, 1)), (1, (4, 4)), (3, (3, 2, 2))])
def test_muon_takes_matrices_in_one_parameter_by_themselves(groups, rows):
    whole = torch.nn.Parameter(torch.randn(groups * sum(rows), 6, generator=torch.Generator().manual_seed(2)))
    setattr(whole, ROW_BLOCKS, (groups, rows))
    kinds = torch.tensor([kind for kind, count in enumerate(rows) for _ in range(count)]).repeat(groups)
    plain = [torch.nn.Parameter(whole.data[kinds == kind].clone()) for kind in range(len(rows))]
    train = replace_keys(TRAIN, optimizer="muon")
    optimizer = UnitOptimizer(named := {"layers.0.several": whole}, rules_of(train, named))
    reference = torch.optim.Muon(plain, weight_decay=0.1, **SCALED)
    for iteration in range(4):
        gradient = torch.randn(whole.shape, generator=torch.Generator().manual_seed(iteration))
        attach(optimizer, lambda _, out, gradient=gradient: out.copy_(gradient.view(-1)))
        optimizer.step(iteration, 1.0)
        for kind, parameter in enumerate(plain):
            parameter.grad = gradient[kinds == kind]
        for group in reference.param_groups:
            group["lr"] = learning_rate(TRAIN, iteration)
        reference.step()
    assert all(torch.equal(whole[kinds == kind], parameter) for kind, parameter in enumerate(plain))


def test_state_holds_only_the_tensors_of_the_optimizers():
    """8 bytes per parameter of Muon's, 12 of AdamW's, and names by which a checkpoint restores them."""
    train = replace_keys(TRAIN, optimizer="muon")
    optimizer = unit(held := parameters(), torch.bfloat16, train)
    names = StoredNames({}, []).between(NAMES, optimizer.layout, 0, 320)
    attach(optimizer, lambda _, out: out.fill_(1.0), names)
    optimizer.step(0, 1.0)
    named = optimizer.named_state(optimizer.state_tensors())
    states = {name: sorted(key.removesuffix(name) for key in named if key.endswith(name)) for name in NAMES}
    assert states.pop(NAMES[0]) == ["", "momentum_buffer.", "rounded.", "step."]
    assert set(map(tuple, states.values())) == {("", "exp_avg.", "exp_avg_sq.", "rounded.", "step.")}
    assert [tensor.numel() for tensor in optimizer.state_tensors()] == [256, 35, 192, 192, 2, 256]
    assert torch.equal(named["momentum_buffer." + NAMES[0]], torch.full((5, 7), 1.0).mul(1 - TRAIN.momentum))
    assert torch.equal(named["rounded.bias"], held[3].data)


@pytest.mark.parametrize("working_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_step_in_pieces_has_the_same_bits(working_type, optimizer, monkeypatch):
    train = replace_keys(TRAIN, optimizer=optimizer)
    whole = unit(parameters(), working_type, train)
    monkeypatch.setattr(module, "ON_CPU", replace(ON_CPU, stepped=96))
    in_pieces = unit(parameters(), working_type, train)
    for iteration in range(3):
        step(whole, iteration, 0.7)
        step(in_pieces, iteration, 0.7)
        for tensor, whole_tensor in zip(in_pieces.state_tensors(), whole.state_tensors(), strict=True):
            assert torch.equal(tensor, whole_tensor)


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize(
    ("keys", "minimum"),
    [
        ({"schedule": "constant"}, 0.0),
        ({"schedule": "linear"}, 1e-5),
        ({"schedule": "cosine"}, 0.0),
        ({"schedule": "cosine"}, 2e-4),
        ({"schedule": "warmup-stable-decay"}, 1e-5),
        ({"schedule": "warmup-stable-decay", "decay": 20}, 0.0),
        ({"schedule": "warmup-stable-decay", "decay": 7, "decay_shape": "cosine"}, 1e-5),
        ({"schedule": "warmup-stable-decay", "decay": 7, "decay_shape": "exponential"}, 1e-5),
        ({"schedule": "warmup-stable-decay", "decay": 7, "decay_shape": "minus-sqrt"}, 0.0),
    ],
)
def test_learning_rate_equals_megatron_cores_bit_for_bit(keys, minimum, warmup):
    train = TrainSection(steps=30, warmup=warmup, minimum_learning_rate=minimum, learning_rate=1e-3, **keys)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = OptimizerParamScheduler(
        plain,
        init_lr=0.0,
        max_lr=train.learning_rate,
        min_lr=minimum,
        lr_warmup_steps=warmup,
        lr_decay_steps=train.steps,
        lr_decay_style="WSD" if train.schedule == "warmup-stable-decay" else train.schedule,
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=train.steps,
        wd_incr_style="constant",
        wsd_decay_steps=train.decay or 3,
        lr_wsd_decay_style=train.decay_shape.replace("-", "_"),
    )
    for iteration in range(40):
        assert learning_rate(train, iteration) == plain.param_groups[0]["lr"], iteration
        reference.step(1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("minimum_learning_rate = 1e-4", 'minimum_learning_rate: needs a schedule other than "constant"'),
        ('schedule = "constant"\nminimum_learning_rate = 1e-4', "minimum_learning_rate: needs a schedule other"),
        ('schedule = "linear"\nminimum_learning_rate = 1.0', "minimum_learning_rate: 1 is above learning_rate = 0.001"),
        ("decay = 3", 'decay: needs schedule = "warmup-stable-decay"'),
        ('schedule = "warmup-stable-decay"\ndecay = 21', "decay: 21 iterations, but 20 come after the warm-up"),
        ('schedule = "cosine"\nwarmup = 30', "warmup: 30 iterations, but steps = 30"),
        ('schedule = "step"', "schedule: invalid enum value 'step'"),
        ('optimizer = "adam"', 'optimizer: "adam" is none of adamw, muon, sgd; or write a class'),
        ('groups = [{parameters = ["*"], optimizer = "lion"}]', r'groups\[0\].optimizer: "lion" is none of adamw'),
        ('groups = [{parameters = ["*"], rate = 1.0}]', r"groups\[0\]: object contains unknown field `rate`"),
        ("groups = [{parameters = []}]", r"groups\[0\].parameters: expected `array` of length >= 1"),
        ("sharded_optimizer = true", "optimizer_copies: 2, but \\[shape\\] pipelines gives a stage 1"),
    ],
)
def test_contradicting_keys_are_refused(keys, message):
    with pytest.raises(JobError, match=rf"job: \[train\] {message}"):
        Job.from_toml(f"[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n[train]\n{keys}")


CPU = torch.device("cpu")
ADDENDS = 18


def addends(count: int = ADDENDS, size=10_000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) * 10.0 ** -(place % 5) for place in range(count)]


def total(kind: type[ExactSum] | type[FastSum], parts: list[torch.Tensor]) -> torch.Tensor:
    accumulator = kind(FlatLayout([parts[0].shape]), ADDENDS, 6, CPU)
    for part in parts:
        accumulator.add(0, part)
    return accumulator.buffer


def test_exact_sums_do_not_depend_on_order_or_the_split_over_hosts():
    parts = addends()
    shuffled = [parts[place] for place in torch.randperm(ADDENDS, generator=torch.Generator().manual_seed(1))]
    whole = total(ExactSum, parts)
    assert torch.equal(total(ExactSum, shuffled), whole)
    # Plain sums do, or the comparison would show nothing.
    assert (total(FastSum, parts) != total(FastSum, shuffled)).float().mean() > 0.3
    first, second, third = total(ExactSum, parts[:5]), total(ExactSum, parts[5:6]), total(ExactSum, parts[6:])
    assert torch.equal(first + second + third, whole)
    assert torch.equal(third + (second + first), whole)
    assert torch.equal(total(ExactSum, parts[1::2]) + total(ExactSum, parts[0::2]), whole)


def test_each_addend_is_rounded_to_the_nearest_grid_point_ties_to_even():
    unit = 2.0 ** -grid_exponent(ADDENDS, 6)
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, 0.51, 3.0]) * unit
    assert (total(ExactSum, [values])[:8] / unit).tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, 0.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("count", "exponent", "grid"), [(1, 0, 53), (2, 6, 46), (18, 6, 42), (32, 6, 42), (33, 6, 41), (4, -20, 71)]
)
def test_the_grid_follows_the_formula(count, exponent, grid):
    assert grid_exponent(count, exponent) == grid


def test_the_largest_addends_allowed_still_sum_exactly():
    ones = [torch.full((1,), 64.0 - 2.0**-17) for _ in range(ADDENDS)]
    assert float(total(ExactSum, ones)[0]) == ADDENDS * (64.0 - 2.0**-17)
    mixed = [*ones[:-1], torch.full((1,), 2.0**-42)]
    assert float(total(ExactSum, mixed)[0]) == math.fsum([17 * (64.0 - 2.0**-17), 2.0**-42])


def test_long_parameters_are_rounded_and_added_in_chunks_with_the_same_result():
    part = addends(1, size=2 * ON_CPU.added + 17)[0]
    accumulator = ExactSum(FlatLayout([torch.Size([3]), part.shape, torch.Size([2])]), ADDENDS, 6, CPU)
    accumulator.add(1, part)
    accumulator.add(1, part)
    first, summed, last = accumulator.layout.views(accumulator.buffer)
    scale = 2.0 ** grid_exponent(ADDENDS, 6)
    assert torch.equal(summed, 2 * (part.double() * scale).round() / scale)
    assert not first.any()
    assert not last.any()


@pytest.mark.parametrize("value", [64.01, -65.0, math.inf, -math.inf, math.nan])
def test_an_addend_out_of_bounds_makes_the_norm_not_finite(value):
    accumulator = ExactSum(FlatLayout([torch.Size([4]), torch.Size([2])]), ADDENDS, 6, CPU)
    accumulator.add(1, torch.tensor([1.0, value]))
    # Also when a later addend brings the sum back within bounds.
    accumulator.add(1, torch.tensor([0.0, -value]))
    assert not math.isfinite(math.fsum(accumulator.mean_norms_squared(ADDENDS)))
    # A reduction carries it to a host whose own addends were fine.
    other = ExactSum(accumulator.layout, ADDENDS, 6, CPU)
    other.add(0, torch.ones(4))
    other.buffer += accumulator.buffer
    assert not math.isfinite(math.fsum(other.mean_norms_squared(ADDENDS)))
    accumulator.clear()
    assert math.fsum(accumulator.mean_norms_squared(ADDENDS)) == 0.0


@pytest.mark.parametrize("kind", [ExactSum, FastSum])
def test_mean_and_norm_divide_once_by_all_micro_batches(kind):
    accumulator = kind(FlatLayout([torch.Size([2]), torch.Size([1])]), 6, 6, CPU)
    for _ in range(6):
        accumulator.add(0, torch.tensor([3.0, 0.0]))
        accumulator.add(1, torch.tensor([4.0]))
    mean = torch.full([accumulator.layout.size], math.nan)
    accumulator.mean(6, mean)
    tail = torch.full([accumulator.layout.size - 2], math.nan)
    accumulator.mean(6, tail, start=2)
    assert torch.equal(tail, mean[2:])
    assert mean.dtype == torch.float32
    assert int((mean != 0).sum()) == 2
    assert [view.tolist() for view in accumulator.layout.views(mean)] == [[3.0, 0.0], [4.0]]
    assert math.fsum(accumulator.mean_norms_squared(6)) == pytest.approx(25.0, rel=1e-15)
