"""The split backward on megatron-core layers, whole or bucket by bucket: same bits, nothing left out in silence."""

import gc
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from recycle import MicroBatch, RunError, megatron_versions
from recycle.exec.model.backward import (
    SplitLinears,
    WeightGradientStore,
    require_exact_split,
)
from recycle.exec.model.config import transformer_config
from recycle.exec.model.tensor_ranks import ensure_parallel_state
from tests.exec.drive import build_pipeline, execute, micro_batches, one_f_one_b, reduce_tied, run_pipelines, small_job

BATCH, OTHER = MicroBatch(0, 0), MicroBatch(0, 1)


@pytest.fixture(autouse=True)
def _parallel_state():
    torch.set_num_threads(1)
    ensure_parallel_state()


class Sum:
    """A sink that adds up, by parameter."""

    def __init__(self):
        self.sums = {}
        self.order = []

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor):
        assert not torch.is_grad_enabled()
        assert not gradient.requires_grad
        self.order.append(parameter)
        self.sums[parameter] = self.sums.get(parameter, 0) + gradient


def column() -> torch.nn.Module:
    config = transformer_config(small_job(), perform_initialization=True)
    options = {"bias": True, "init_method": torch.nn.init.xavier_normal_}
    return ColumnParallelLinear(16, 24, config=config, **options)


def row() -> torch.nn.Module:
    config = transformer_config(small_job(), perform_initialization=True)
    options = {"bias": False, "input_is_parallel": True, "skip_bias_add": False}
    return RowParallelLinear(24, 16, config=config, init_method=torch.nn.init.xavier_normal_, **options)


class Pair(torch.nn.Module):
    """Column then row, with a non-linearity between, as in an MLP."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = column(), row()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)[0]))[0]


def inputs(seed=0) -> torch.Tensor:
    return torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def split_pair() -> tuple[Pair, WeightGradientStore, Sum]:
    model, sink = Pair(), Sum()
    store = WeightGradientStore(sink)
    SplitLinears(model, store).split()
    return model, store, sink


def test_split_has_the_bits_of_megatrons_backward():
    plain, (model, store, sink) = Pair(), split_pair()
    expected, entry = inputs(), inputs()
    plain(expected).square().sum().backward()
    with store.record(BATCH):
        model(entry).square().sum().backward()
    assert torch.equal(entry.grad, expected.grad)
    assert sink.sums == {}
    store.flush(BATCH)
    assert len(sink.sums) == 3
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(sink.sums[parameter], reference.grad), name
        assert parameter.grad is None


def test_graph_below_saved_inputs_is_freed_between_i_and_w():
    model, store, _ = split_pair()
    entry = inputs()
    watched = weakref.ref(entry)
    with store.record(BATCH):
        # The layer's input is computed, so a saved input that is not detached holds the graph and `entry` with it.
        model(entry * 2).square().sum().backward()
    del entry
    gc.collect()
    assert store.held(BATCH)
    assert watched() is None


REFUSED = [
    (lambda layer: setattr(layer, "gradient_accumulation_fusion", True), "gradient_accumulation_fusion"),
    (lambda layer: setattr(layer.config, "defer_embedding_wgrad_compute", True), "defer_embedding_wgrad_compute"),
]


@pytest.mark.parametrize(("switch_on", "name"), REFUSED)
def test_unsupported_feature_is_refused_at_the_start(switch_on, name):
    layer = column()
    switch_on(layer)
    with pytest.raises(RunError, match=f"0: the split backward does not support {name}"):
        SplitLinears(torch.nn.Sequential(layer), WeightGradientStore(Sum()))


def test_unknown_argument_of_a_linear_layer_must_be_neutral(monkeypatch):
    model, _, _ = split_pair()
    hook, entry = getattr(model.first, megatron_versions._LINEAR_HOOK), inputs()
    monkeypatch.setattr(megatron_versions, "linear_defaults", lambda: {"shards": 1})
    call = partial(hook, entry, model.first.weight, None, False, False, False)
    call(shards=1)
    for others in ({"shards": 2}, {"other": 1}):
        with pytest.raises(RunError, match=f"does not support {next(iter(others))}"):
            call(**others)


@pytest.mark.parametrize("spoiled", ["put", "flush"])
def test_inexact_split_backward_is_refused_at_the_start(spoiled, monkeypatch):
    """As with a megatron-core that computes linear layers in another way."""
    right = WeightGradientStore.put
    if spoiled == "flush":
        monkeypatch.setattr(WeightGradientStore, "flush", lambda self, _: None)
    else:
        monkeypatch.setattr(
            WeightGradientStore,
            "put",
            lambda self, weight, bias, x, gradient, _=None: right(self, weight, bias, x, 2 * gradient),
        )
    with pytest.raises(RunError, match=r"has other gradients than megatron-core 0\."):
        require_exact_split.__wrapped__()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulation", "model", "buckets"), [("exact", {}, 5), ("exact", {"tied": True}, 2), ("fast", {"tied": True}, 5)]
)
def test_weight_gradients_by_bucket_have_the_same_bits(accumulation, model, buckets):
    job = small_job(ranks=2, model=model, train={"accumulation": accumulation})
    whole, cut = build_pipeline(job), build_pipeline(job)
    batches = micro_batches(0, 4)
    run_pipelines([whole], 5, 4)
    for stage in cut:
        stage.begin_iteration(5)
    execute(
        (stage, [("I" if kind == "B" else kind, batch) for kind, batch in one_f_one_b(stage.index, 2, batches)])
        for stage in cut
    )
    for stage in cut:
        finished = []
        for bucket in range(buckets):
            for batch in batches:
                stage.backward_weight(batch, bucket, buckets)
            for earlier, content in enumerate(finished):
                assert torch.equal(stage.gradient_bucket(earlier, buckets)[0], content)
            finished.append(stage.gradient_bucket(bucket, buckets)[0].clone())
        assert stage.held_micro_batches() == 0
    reduce_tied(cut)
    for left, right in zip(whole, cut, strict=True):
        assert all(map(torch.equal, left.gradient_buffers(), right.gradient_buffers()))
        assert left.gradient_norms_squared() == right.gradient_norms_squared()


SCRIPT = """
import sys
import torch
from recycle.exec import emulation
print("megatron" in sys.modules)
from recycle.exec.model import gpt
from recycle.exec.model.build import build_stages
from recycle.job import Job

job = "[shape]\\npipelines = 1\\nranks = 1\\nmicro_batches = 1\\n[model]\\nlayers = 1\\nhidden = 8\\nheads = 1\\n"
build_stages(Job.from_toml(job), [0])
print(torch.are_deterministic_algorithms_enabled())
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
import torch._inductor.config
print(torch._inductor.config.deterministic)
"""


@pytest.mark.process
def test_megatron_and_the_compiler_are_imported_late():
    """Emulated stages need no megatron-core. The compiler is then deterministic."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["False", "True", "[]", "True"], done.stderr
