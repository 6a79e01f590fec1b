"""Correspondence between blocks of recycle's tensors and of Hugging Face's: one table for both directions.

megatron-core keeps queries, keys and values in one matrix, group by group: the rows of the group's query heads, then of
its key, then of its value. Hugging Face keeps three matrices. Gate and up projections are separate tensors on both
sides. Experts in transformers 5 differ: one tensor holds both projections of all experts of a layer.

Limits: rotary positions must rotate the first half of a head against the second, as in all of these architectures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from recycle.job.architecture import Architecture, config_of
from recycle.job.sections import ModelSection

TensorShape = tuple[int, ...]
EVERYTHING: tuple[slice, ...] = ()
_NORMS = (("input_layernorm.weight", "input_layernorm"), ("pre_mlp_layernorm.weight", "post_attention_layernorm"))
_GEMMA_NORMS = (
    ("input_layernorm.centered_weight", "input_layernorm"),
    ("self_attn_bda.centered_weight", "post_attention_layernorm"),
    ("pre_mlp_layernorm.centered_weight", "pre_feedforward_layernorm"),
    ("mlp_bda.centered_weight", "post_feedforward_layernorm"),
)
"""Vectors of a layer -> norms of Hugging Face."""
_PROJECTIONS, _MIXTRAL_PROJECTIONS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


@dataclass(frozen=True)
class TensorBlock:
    """Entries that exist on both sides.

    Attributes:
        our_view: shape that `our_index` refers to.
        our_index: index of the block in that view.
        their_index: index of the block in that tensor.
    """

    ours: str
    our_shape: TensorShape
    our_view: TensorShape
    our_index: tuple[slice, ...]
    theirs: str
    their_shape: TensorShape
    their_index: tuple[slice, ...]

    def copy_in(self, ours: Tensor, block: Tensor) -> None:
        target = ours.view(self.our_view)[self.our_index]
        target.copy_(block.reshape(target.shape))

    def copy_out(self, theirs: Tensor, ours: Tensor) -> None:
        target = theirs[self.their_index]
        target.copy_(ours.view(self.our_view)[self.our_index].reshape(target.shape))


def _same(ours: str, theirs: str, *shape: int) -> TensorBlock:
    return TensorBlock(ours, shape, shape, EVERYTHING, theirs, shape, EVERYTHING)


def blocks(model: ModelSection, batched_experts: bool = False) -> Iterator[TensorBlock]:
    """Iterate over all blocks of a model; each entry of both sides is in exactly one.

    Args:
        batched_experts: whether a layer's experts share two tensors, as transformers 5 holds them in memory. Otherwise
            each expert has three, as in files.
    """
    sizes = Architecture.of(model)
    hidden, vocabulary = sizes.hidden, sizes.vocabulary
    has_experts = "num_moe_experts" in config_of(model)
    yield _same("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocabulary, hidden)
    for layer in range(model.layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        for our_norm, their_norm in _GEMMA_NORMS if model.kind == "gemma" else _NORMS:
            yield _same(f"{ours}.{our_norm}", f"{theirs}.{their_norm}.weight", hidden)
        yield from _attention(model, sizes, f"{ours}.self_attention", f"{theirs}.self_attn")
        if not has_experts:
            yield from _feed_forward(sizes, f"{ours}.mlp", f"{theirs}.mlp", _PROJECTIONS)
            continue
        is_mixtral = model.kind == "mixtral" and not batched_experts
        moe = f"{theirs}.block_sparse_moe" if is_mixtral else f"{theirs}.mlp"
        yield _same(f"{ours}.mlp.router.weight", f"{moe}.gate.weight", sizes.experts, hidden)
        for expert in range(sizes.experts):
            part = f"{ours}.mlp.experts.local_experts.{expert}"
            if batched_experts:
                yield from _batched_expert(part, f"{moe}.experts", expert, sizes)
            else:
                names = _MIXTRAL_PROJECTIONS if is_mixtral else _PROJECTIONS
                yield from _feed_forward(sizes, part, f"{moe}.experts.{expert}", names)
    yield _same(f"decoder.final_layernorm.{_norm_weight(model)}", "model.norm.weight", hidden)
    if not model.tied:
        yield _same("output_layer.weight", "lm_head.weight", vocabulary, hidden)


def _norm_weight(model: ModelSection) -> str:
    return "centered_weight" if model.kind == "gemma" else "weight"


def _attention(model: ModelSection, sizes: Architecture, ours: str, theirs: str) -> Iterator[TensorBlock]:
    fields = config_of(model)
    head = sizes.query // model.heads
    groups = sizes.key // head
    of_group = model.heads // groups
    rows = {"q": slice(0, of_group), "k": slice(of_group, of_group + 1), "v": slice(of_group + 1, of_group + 2)}
    kinds: dict[str, TensorShape] = {"weight": (sizes.hidden,)} | ({"bias": ()} if fields.get("add_qkv_bias") else {})
    for kind, columns in kinds.items():
        whole, view = (sizes.query + 2 * sizes.key, *columns), (groups, of_group + 2, head, *columns)
        for name, index in rows.items():
            shape = (sizes.query if name == "q" else sizes.key, *columns)
            yield TensorBlock(
                f"{ours}.linear_qkv.{kind}",
                whole,
                view,
                (slice(None), index),
                f"{theirs}.{name}_proj.{kind}",
                shape,
                EVERYTHING,
            )
    if fields.get("qk_layernorm"):
        for name in ("q", "k"):
            yield _same(f"{ours}.{name}_layernorm.{_norm_weight(model)}", f"{theirs}.{name}_norm.weight", head)
    yield _same(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", sizes.hidden, sizes.query)


def _feed_forward(sizes: Architecture, ours: str, theirs: str, names: tuple[str, str, str]) -> Iterator[TensorBlock]:
    gate, up, down = names
    yield _same(f"{ours}.linear_fc1.weight.gate", f"{theirs}.{gate}.weight", sizes.ffn, sizes.hidden)
    yield _same(f"{ours}.linear_fc1.weight.up", f"{theirs}.{up}.weight", sizes.ffn, sizes.hidden)
    yield _same(f"{ours}.linear_fc2.weight", f"{theirs}.{down}.weight", sizes.hidden, sizes.ffn)


def _batched_expert(ours: str, theirs: str, expert: int, sizes: Architecture) -> Iterator[TensorBlock]:
    inner, outer = (sizes.ffn, sizes.hidden), (sizes.hidden, sizes.ffn)
    at = slice(expert, expert + 1)
    both = (sizes.experts, 2 * sizes.ffn, sizes.hidden)
    for half, rows in (("gate", slice(0, sizes.ffn)), ("up", slice(sizes.ffn, 2 * sizes.ffn))):
        name = f"{ours}.linear_fc1.weight.{half}"
        yield TensorBlock(name, inner, inner, EVERYTHING, f"{theirs}.gate_up_proj", both, (at, rows))
    name = f"{ours}.linear_fc2.weight"
    yield TensorBlock(name, outer, outer, EVERYTHING, f"{theirs}.down_proj", (sizes.experts, *outer), (at,))
