"""Prices of a job's instructions: from the job's sections to seconds, bytes and memory limits."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil

from recycle.errors import JobError
from recycle.job import analytic
from recycle.job.cut import profile_of_cut, units_of
from recycle.job.profile import PerStage, Profile
from recycle.job.sections import ANALYTIC, AUTO, Sections
from recycle.job.shape import Shape

_WEIGHED_BY = {
    "forward": "forward",
    "backward_input": "backward_input",
    "backward_weight": "backward_weight",
    "overlapped_pair": "seconds",
    "redundant_forward": "forward",
    "reduce": "gradients",
    "step": "step",
    "gather": "step",
    "static": "static",
    "activation": "activation",
}
"""Price of a stage -> attribute of an analytic layer that weighs the layer's share of the price."""
_MOST_DIGITS = 30


def profile_of(job: Sections) -> Profile:
    """Return the times and bytes to plan with, from the file or model in `[times] profile`, or from `[times]`.

    Raises JobError if the profile file cannot be read, or layers do not divide over stages.
    """
    times, memory = job.times, job.memory
    if times.profile == ANALYTIC:
        profile = analytic.profile(job, job.layers_per_stage())
    elif times.profile is not None:
        profile = Profile.load(times.profile)
    else:
        profile = Profile(
            forward=times.forward,
            backward_input=times.backward_input,
            backward_weight=times.backward_weight,
            latency=times.link,
            step=times.step,
            activation=1.0 if memory.activation is None else _bytes_per_stage(memory.activation, "activation"),
            static=0.0 if memory.static is None else _bytes_per_stage(memory.static, "static"),
            weight_stash=memory.weight_stash,
        )
    if (rate := memory.host_bandwidth) is not None:
        rate = parse_bytes(rate, "[memory] host_bandwidth") if isinstance(rate, str) else rate
        profile = replace(profile, host_bandwidth=rate)
    return profile


def _bytes_per_stage(written: str | list[str], key: str) -> PerStage:
    if isinstance(written, list):
        return [parse_bytes(text, f"[memory] {key}") for text in written]
    return parse_bytes(written, f"[memory] {key}")


def layer_seconds(job: Sections) -> list[float]:
    """Return F + I + W of each layer for `[model] split = "auto"`.

    They come from the analytic model; each layer counts 1 without a profile, or with an emulated model.
    """
    if job.times.profile is None or job.model.kind == "emulated":
        return [1.0] * job.model.layers
    return [layer.seconds for layer in analytic.layers(job)]


def profile_of_layout(job: Sections, prices: Profile, shape: Shape) -> Profile:
    """Return the job's prices with an entry for each stage of `shape.cut`; `prices` itself for a shape without a cut.

    If the analytic model prices the job, each unit has its analytic share of its fault-free stage's price (the
    embedding belongs to the first layer, the head to the last), else equal shares. Raises JobError as `profile_of_cut`.
    """
    if not shape.cut:
        return prices
    weights: dict[str, list[float]] = {}
    if job.times.profile == ANALYTIC:
        layers = analytic.layers(job)
        weights = {
            name: [float(getattr(layer, attribute)) for layer in layers] for name, attribute in _WEIGHED_BY.items()
        }
    return profile_of_cut(prices, shape, units_of(job), weights)


def activation_limits(job: Sections, profile: Profile | None = None) -> list[float] | None:
    """Return the activations (in chunks) that a worker of each rank may hold; None: unlimited.

    A limit in bytes is reduced by the static bytes and workspace of the rank's stages, then divided by the activation
    of its heaviest stage, by `profile` or else the job's. Raises JobError as in `byte_limit`.
    """
    limit, ranks = job.memory.limit, job.grid.ranks
    if limit is None:
        return None
    if isinstance(limit, int):
        return [float(limit)] * ranks
    if isinstance(limit, list):
        return [float(entry) for entry in limit]
    profile, shape, stages = profile or profile_of(job), job.shape, job.shape.stages
    activation, room = profile.per_stage("activation", stages), byte_limit(job, profile)
    assert room is not None
    limits = []
    for hosted in map(shape.stages_of_rank, range(ranks)):
        free = room - profile.fixed_bytes(hosted, stages)
        limits.append(float(free // max(*(activation[stage] for stage in hosted), 1e-30)))
    return limits


def byte_limit(job: Sections, profile: Profile) -> float | None:
    """Return the bytes that each worker may hold; None if the job has no limit or one in activations.

    Raises JobError if the limit is the device's memory, and the profile does not state it.
    """
    limit = job.memory.limit
    if not isinstance(limit, str):
        return None
    if limit != AUTO:
        return parse_bytes(limit, "[memory] limit")
    if profile.capacity is None:
        raise JobError(
            '[memory] limit: "auto" is the memory of the device, which this profile does not state; measure a profile'
            " on the device (recycle profile JOB -o FILE), or state bytes"
        )
    return profile.capacity


def parse_bytes(text: str, key: str) -> float:
    """Parse a size such as "20 GiB" or "512 MB" into bytes. Raises JobError that begins with `key`."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B\s*", text)
    if match is None or len(match[1]) > _MOST_DIGITS:
        others = ', "auto", or a number of activations' if key == "[memory] limit" else ""
        raise JobError(f'{key}: {text!r} is not a size: write for example "20 GiB"{others}')
    return float(match[1]) * float(1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")


def size_text(amount: float, like: str) -> str:
    """Format bytes for `parse_bytes`, rounded up to a hundredth of the unit of `like`, or of a GiB for "auto"."""
    unit = "GiB" if like == AUTO else like.lstrip(" 0123456789.").strip()
    return (
        f"{ceil(amount / parse_bytes(f'1 {unit}', '[memory] limit') * 100 - 1e-9) / 100:.2f}".rstrip("0").rstrip(".")
        + f" {unit}"
    )
