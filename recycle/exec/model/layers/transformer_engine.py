"""Transformer Engine's linear layers and norms in the spec of a layer, for `[model.config] transformer_impl`.

They stand one for one in the places of megatron-core's own, no norm is fused with a linear layer, so parameters have
the same names and checkpoints fit both. Attention stays torch's `scaled_dot_product_attention`. The linear layers delay
their weight gradients themselves (`delay_wgrad_compute`), which W then computes (delayed_layers.py).

Limits: one tensor rank. Transformer Engine sums over tensor ranks in groups of its own, whose order of adding is not
that of `TensorGroup`. Not run with Transformer Engine itself, which needs a GPU.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle.errors import JobError

NAME = "transformer_engine"
"""The value of megatron-core's `transformer_impl` that asks for these modules; "local" are its own."""


def prepare(config: TransformerConfig) -> None:
    """Have linear layers delay their weight gradients, if the configuration asks for Transformer Engine's.

    Raises:
        JobError: it is not installed, or there are several tensor ranks.
    """
    if config.transformer_impl != NAME:
        return
    key = f'[model.config] transformer_impl = "{NAME}"'
    if config.tensor_model_parallel_size > 1:
        raise JobError(f'{key}: cannot be used with [shape] tensor_parallel > 1; write "local"')
    if not HAVE_TE:
        raise JobError(f'{key}: Transformer Engine is not installed: pip install "transformer-engine[pytorch]"')
    # Set behind megatron-core's checks, which allow it only with an overlap of experts that no stage here has.
    config.delay_wgrad_compute = True


def backend() -> BackendSpecProvider:
    """What Transformer Engine has for each place of a layer."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # imports Apex where it is

    provider: BackendSpecProvider = TESpecProvider()
    return provider


def put_into(spec: Any, config: TransformerConfig) -> None:
    """Replace megatron-core's linear layers and norms in a spec, those of experts too, by Transformer Engine's.

    Args:
        spec: a `ModuleSpec` or the submodules of one.
    """
    own, provider, rms = LocalSpecProvider(), backend(), config.normalization == "RMSNorm"
    _replace(
        spec,
        {
            own.column_parallel_linear(): provider.column_parallel_linear(),
            own.row_parallel_linear(): provider.row_parallel_linear(),
            own.layer_norm(rms_norm=rms): provider.layer_norm(rms_norm=rms),
        },
    )


def _replace(part: Any, by: dict[Any, Any]) -> None:
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, type) and value in by:
            setattr(part, field.name, by[value])
        elif is_dataclass(value) and not isinstance(value, type):
            _replace(value, by)
