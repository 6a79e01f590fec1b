"""The split backward on bare megatron-core layers: same bits, nothing kept too long, nothing left out in silence."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from recycle import MicroBatch, RunError
from recycle.exec.model.backward import (
    WeightGradientStore,
    require_tested_version,
    split_linears,
)
from recycle.exec.model.config import transformer_config
from recycle.exec.model.tensor_ranks import ensure_parallel_state
from tests.exec.drive import small_job

BATCH, OTHER = MicroBatch(0, 0), MicroBatch(0, 1)


@pytest.fixture(autouse=True)
def _parallel_state() -> None:
    torch.set_num_threads(1)
    ensure_parallel_state()


class Sum:
    """A sink that adds up, by parameter."""

    def __init__(self) -> None:
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        self.order: list[torch.Tensor] = []

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        assert not torch.is_grad_enabled()
        assert not gradient.requires_grad
        self.order.append(parameter)
        self.sums[parameter] = self.sums.get(parameter, 0) + gradient


def column(kind: type = ColumnParallelLinear, inputs: int = 16, **changes: Any) -> torch.nn.Module:
    options = {"bias": True, "init_method": torch.nn.init.xavier_normal_} | changes
    config = transformer_config(small_job(), perform_initialization=True)
    return kind(inputs, 24, config=config, **options)


def row() -> torch.nn.Module:
    config = transformer_config(small_job(), perform_initialization=True)
    options = {"bias": False, "input_is_parallel": True, "skip_bias_add": False}
    return RowParallelLinear(24, 16, config=config, init_method=torch.nn.init.xavier_normal_, **options)


class Pair(torch.nn.Module):
    """Column then row, with a non-linearity between, as in an MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = column(), row()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)[0]))[0]


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def split_pair() -> tuple[Pair, WeightGradientStore, Sum]:
    model, sink = Pair(), Sum()
    store = WeightGradientStore(sink)
    assert split_linears(model, store) == 2
    return model, store, sink


def test_the_split_gives_the_bits_of_megatrons_own_backward() -> None:
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


def test_without_a_recording_store_it_is_a_whole_backward() -> None:
    plain, (model, store, sink) = Pair(), split_pair()
    plain(inputs()).square().sum().backward()
    model(inputs()).square().sum().backward()
    assert store.waiting() == set()
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(sink.sums[parameter], reference.grad)


def test_between_i_and_w_the_graph_below_the_saved_inputs_is_gone() -> None:
    model, store, _ = split_pair()
    entry = inputs()
    watched = weakref.ref(entry)
    with store.record(BATCH):
        # The layer's input is computed, so a saved input that is not detached holds the graph and `entry` with it.
        model(entry * 2).square().sum().backward()
    del entry
    gc.collect()
    assert store.waiting() == {BATCH}
    assert watched() is None


def test_the_input_gradient_is_summed_over_the_tensor_parallel_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, sink = split_pair()
    model.first.allreduce_dgrad = True
    groups = []
    reduce = torch.distributed.all_reduce

    def spy(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        groups.append(group)
        return reduce(tensor, group=group, async_op=async_op)

    monkeypatch.setattr(torch.distributed, "all_reduce", spy)
    entry, expected = inputs(), inputs()
    model(entry).square().sum().backward()
    Pair()(expected).square().sum().backward()
    assert groups == [model.first.tp_group]
    assert torch.equal(entry.grad, expected.grad)
    assert len(sink.sums) == 3


class OwnForward(ColumnParallelLinear):
    """A subclass that computes by itself."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return inputs @ self.weight.t(), None


def test_a_subclass_with_its_own_forward_is_refused() -> None:
    with pytest.raises(RunError, match="0: OwnForward has a forward of its own"):
        split_linears(torch.nn.Sequential(column(OwnForward)), WeightGradientStore(Sum()))


def test_a_linear_layer_of_another_library_is_refused() -> None:
    model = torch.nn.Sequential(column(), torch.nn.Linear(24, 16))
    with pytest.raises(RunError, match="1: Linear has no split backward; use megatron-core's local layer spec"):
        split_linears(model, WeightGradientStore(Sum()))


REFUSED = [
    (lambda layer: setattr(layer, "sequence_parallel", True), "sequence_parallel"),
    (lambda layer: setattr(layer, "gradient_accumulation_fusion", True), "gradient_accumulation_fusion"),
    (lambda layer: setattr(layer.config, "defer_embedding_wgrad_compute", True), "defer_embedding_wgrad_compute"),
    (lambda layer: layer.weight.requires_grad_(False), "frozen weights"),
]


@pytest.mark.parametrize(("switch_on", "name"), REFUSED)
def test_what_the_split_does_not_know_is_refused_at_the_start(switch_on: Any, name: str) -> None:
    layer = column()
    switch_on(layer)
    with pytest.raises(RunError, match=f"0: the split backward knows no {name}"):
        split_linears(torch.nn.Sequential(layer), WeightGradientStore(Sum()))


def test_an_untested_megatron_core_is_refused_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.99.0")
    with pytest.raises(RunError, match=r"megatron-core 0\.99\.0: .* tested with 0\.16\.1"):
        require_tested_version()
