"""The analytic model: published FLOPs and bytes come out of it, and a job of it is planned like any other."""

import pytest

from recycle import Job
from recycle.job.analytic import GPUS, layers
from recycle.job.footprint import ON_GPU
from tests import ROOT

PAPER = sorted((ROOT / "benchmarks" / "paper").glob("*.toml"))


LEAN = 'precision = "bf16"\naccumulation = "fast"\n'


def job(model="", how="", shape="", train: str = LEAN) -> Job:
    return Job.from_toml(
        "[shape]\npipelines = 2\nranks = 4\nmicro_batches = 4\n"
        + shape
        + '[times]\nprofile = "analytic"\n[memory]\nlimit = "80 GB"\n'
        + "[model]\nlayers = 8\nhidden = 1024\nheads = 16\nsequence = 2048\nvocabulary = 51200\n"
        + model
        + f"[data]\nmicro_batch_size = 2\n[train]\n{train}[analytic]\n"
        + how
    )


def test_flops_are_those_of_narayanan_et_al():
    """96 B s l h^2 (1 + s / 6h + V / 16lh) with everything computed again, which makes four passes of three."""
    plain = job(how='activations = "all"\nachieved = 0.25\n')
    work = sum(layer.seconds for layer in layers(plain)) * GPUS["A100-80GB"].flops * 0.25
    s, h, count, v = 2048, 1024, 8, 51200
    assert work == pytest.approx(72 * 2 * s * count * h * h * (1 + s / (6 * h) + v / (12 * count * h)), rel=1e-9)
    again = job(how='activations = "full"\nachieved = 0.25\n')
    more = sum(layer.seconds for layer in layers(again)) * GPUS["A100-80GB"].flops * 0.25
    bodies = 96 * 2 * s * count * h * h * (1 + s / (6 * h))
    assert more == pytest.approx(bodies + 8 * 2 * s * h * v - 2 * 2 * s * h * v, rel=0.2)


def test_activations_are_those_of_korthikanti_et_al_without_the_masks_of_dropout():
    sbh = 2048 * 2 * 1024
    middle = {how: layers(job(how=f'activations = "{how}"\n'))[3].activation for how in ("all", "selective", "full")}
    assert middle == {"all": sbh * (32 + 5 * 16 * 2048 / 1024), "selective": sbh * 32, "full": 2 * sbh}
    parted = layers(job(shape="tensor_parallel = 4\n"))[3]
    assert parted.activation == sbh * 32 / 4
    assert layers(job(model="dropout = 0.1\n"))[3].activation == sbh * 34
    assert layers(job(train='precision = "fp32"\n'))[3].activation == sbh * 64
    assert parted.message == 2 * sbh / 4


def test_a_parameter_weighs_eighteen_bytes_of_which_fourteen_are_copied_and_kept_for_an_undo():
    every = layers(job())
    parameters = sum(layer.static for layer in every) / 18
    assert parameters == 8 * (12 * 1024**2 + 13 * 1024) + 2 * 51200 * 1024 + 2048 * 1024 + 2 * 1024
    assert sum(layer.state for layer in every) == 14 * parameters
    assert sum(layer.undo for layer in every) == 14 * parameters
    assert sum(layer.gradients for layer in every) == 4 * parameters
    pieces = 4 * 4 * ON_GPU.stepped
    assert sum(job().profile().per_stage("static", 4)) == 32 * parameters + pieces
    on_host = job(train=LEAN + 'undo = "host"\n').profile()
    assert sum(on_host.per_stage("static", 4)) == 18 * parameters + pieces
    copied = [b - a for a, b in zip(job().profile().per_stage("step", 4), on_host.per_stage("step", 4), strict=True)]
    assert sum(copied) == pytest.approx(14 * parameters / 25e9)


def test_an_exact_sum_costs_the_bytes_that_it_moves_more():
    """20 bytes of a parameter and micro-batch in place of 12 in bf16; 24 in place of 8 in fp32."""
    for precision, more in (("bf16", 8), ("fp32", 16)):
        seconds = {}
        for accumulation in ("exact", "fast"):
            train = f'precision = "{precision}"\naccumulation = "{accumulation}"\n'
            seconds[accumulation] = sum(layer.backward_weight for layer in layers(job(train=train)))
        parameters = sum(layer.state for layer in layers(job())) / 14
        assert seconds["exact"] - seconds["fast"] == pytest.approx(parameters * more / 2.039e12)


def test_recomputing_stage_holds_its_input_then_all_activations():
    sbh = 2 * 2048 * 2 * 1024
    split = job(model='recompute = "full"\n').profile()
    assert split.per_stage("recomputed_from", 4) == [0.0, sbh, sbh, sbh]
    assert split.per_stage("activation", 4)[1] == 2 * 16 * sbh
    undivided = Job.from_toml(
        job(model='recompute = "full"\n').to_toml().replace("decoupled = true", "decoupled = false")
    )
    assert undivided.profile().per_stage("activation", 4)[1] == sbh
    difference = undivided.profile().per_stage("workspace", 4)[1] - split.per_stage("workspace", 4)[1]
    assert difference == 2 * 16 * sbh


def test_tensor_parallelism_divides_the_work_and_adds_all_reduces():
    alone, parted = layers(job())[3], layers(job(shape="tensor_parallel = 2\n"))[3]
    ring = 2 * (1 / 2) * 2 * 2 * 2048 * 1024 / 300e9
    assert parted.forward == pytest.approx(alone.forward / 2 + 2 * ring)
    assert parted.backward_weight == pytest.approx(alone.backward_weight / 2)


@pytest.mark.parametrize("file", PAPER, ids=lambda file: file.stem)
def test_the_published_settings_have_their_sizes_and_fit(file):
    published = Job.load(file)
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
    parameters = sum(layer.state for layer in layers(published)) / 14 * published.grid.tensor_parallel / 1e9
    assert parameters == pytest.approx(sizes[file.stem], rel=0.15)
    assert published.shape.worker_count * published.grid.tensor_parallel == gpus.get(file.stem, 32)
    limits = published.activation_limits()
    assert min(limits) >= 1
