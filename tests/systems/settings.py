"""Settings for tests of systems: stages of whole layers, times that are whole numbers."""

from __future__ import annotations

from typing import Any

from recycle import Job
from recycle.job import price
from recycle.job.layers import Layer
from recycle.systems.setting import Setting


def setting(pipelines: int, ranks: int, micro_batches: int, layers: int | None = None, **other: Any) -> Setting:
    """A setting of equal layers, one per rank unless said, F = I = W = 1; `other` are attributes of Setting, and
    `layer` those of its layers."""
    text = f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {micro_batches}\n"
    if layers is not None:
        split = [layers // ranks + (rank < layers % ranks) for rank in range(ranks)]
        text += f"[model]\nlayers = {layers}\nsplit = {split}\n"
    layer = Layer(**{"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, **other.pop("layer", {})})
    other.setdefault("node_of", tuple(range(pipelines * ranks)))
    return Setting(price(Job.from_toml(text)), (layer,) * (ranks if layers is None else layers), **other)
