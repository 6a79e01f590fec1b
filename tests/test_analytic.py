"""The analytic model: published FLOPs and bytes come out of it, and a job of it is planned like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle import Job
from recycle.analytic import GPUS, assumptions, layers, profile
from recycle.errors import JobError

PAPER = sorted((Path(__file__).parents[1] / "benchmarks" / "paper").glob("*.toml"))


def job(model: str = "", how: str = "", shape: str = "") -> Job:
    return Job.from_toml(
        "[shape]\npipelines = 2\nranks = 4\nmicro_batches = 4\n"
        + shape
        + '[times]\nprofile = "analytic"\n[memory]\nlimit = "80 GB"\n'
        + "[model]\nlayers = 8\nhidden = 1024\nheads = 16\nsequence = 2048\nvocabulary = 51200\n"
        + model
        + "[data]\nmicro_batch_size = 2\n[analytic]\n"
        + how
    )


def test_flops_are_those_of_narayanan_et_al() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh) with everything computed again, which makes four passes of three."""
    one = job(how='activations = "all"\nachieved = 0.25\n')
    work = sum(layer.seconds for layer in layers(one)) * GPUS["A100-80GB"].flops * 0.25
    s, h, count, v = 2048, 1024, 8, 51200
    assert work == pytest.approx(72 * 2 * s * count * h * h * (1 + s / (6 * h) + v / (12 * count * h)), rel=1e-9)
    again = job(how='activations = "full"\nachieved = 0.25\n')
    more = sum(layer.seconds for layer in layers(again)) * GPUS["A100-80GB"].flops * 0.25
    bodies = 96 * 2 * s * count * h * h * (1 + s / (6 * h))
    assert more == pytest.approx(bodies + 8 * 2 * s * h * v - 2 * 2 * s * h * v, rel=0.2)


def test_activations_are_those_of_korthikanti_et_al() -> None:
    sbh = 2048 * 2 * 1024
    middle = {how: layers(job(how=f'activations = "{how}"\n'))[3].activation for how in ("all", "selective", "full")}
    assert middle == {"all": sbh * (34 + 5 * 16 * 2048 / 1024), "selective": sbh * 34, "full": 2 * sbh}
    parted = layers(job(shape="tensor_parallel = 4\n"))[3]
    assert parted.activation == sbh * 34 / 4
    assert parted.message == 2 * sbh / 4


def test_a_parameter_weighs_eighteen_bytes_of_which_fourteen_are_copied() -> None:
    every = layers(job())
    parameters = sum(layer.static for layer in every) / 18
    assert parameters == 8 * (12 * 1024**2 + 13 * 1024) + 2 * 51200 * 1024 + 2048 * 1024
    assert sum(layer.state for layer in every) == 14 * parameters
    assert sum(layer.gradients for layer in every) == 4 * parameters


def test_tensor_parallelism_divides_the_work_and_adds_all_reduces() -> None:
    alone, parted = layers(job())[3], layers(job(shape="tensor_parallel = 2\n"))[3]
    ring = 2 * (1 / 2) * 2 * 2 * 2048 * 1024 / 300e9
    assert parted.forward == pytest.approx(alone.forward / 2 + 2 * ring)
    assert parted.backward_weight == pytest.approx(alone.backward_weight / 2)


def test_the_jobs_profile_and_limits_follow() -> None:
    one = job()
    assert one.profile() == profile(one, [2] * 4)
    assert one.profile().reduce == [2 * 0.5 * g / 25e9 for g in _gradients(one)]
    assert one.activation_limits() is not None
    assert one.seconds_per_unit == 1.0
    assert any("billion parameters" in line for line in assumptions(one))


def _gradients(one: Job) -> list[float]:
    every = layers(one)
    return [every[at].gradients + every[at + 1].gradients for at in range(0, 8, 2)]


def test_layers_that_do_not_divide_are_refused_at_once() -> None:
    with pytest.raises(JobError, match=r"\[model\] layers: 8 layers do not divide over 3 stages"):
        Job.from_toml(
            '[shape]\npipelines = 1\nranks = 3\nmicro_batches = 1\n[times]\nprofile = "analytic"\n[model]\nlayers = 8\n'
        )


@pytest.mark.parametrize("file", PAPER, ids=lambda file: file.stem)
def test_the_published_settings_have_their_sizes_and_fit(file: Path) -> None:
    one = Job.load(file)
    sizes = {
        "gpt3_medium": 0.36,
        "gpt3_3_35b": 3.35,
        "gpt3_6_7b": 6.7,
        "18b": 18.4,
        "39b": 39.1,
        "76b": 76.1,
        "145b": 145.6,
    }
    gpus = {"18b": 256, "39b": 512, "76b": 1024, "145b": 1536}
    parameters = sum(layer.state for layer in layers(one)) / 14 * one.grid.tensor_parallel / 1e9
    assert parameters == pytest.approx(sizes[file.stem], rel=0.15)
    assert one.shape.worker_count * one.grid.tensor_parallel == gpus.get(file.stem, 32)
    limits = one.activation_limits()
    assert limits is not None
    assert min(limits) >= 1
