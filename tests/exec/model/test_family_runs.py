"""Runs of every family: killed, brought back, stopped, cut into tensor ranks, to the same bits."""

import pytest

from recycle import Job
from recycle.exec import run
from recycle.ir.families import one_f_one_b
from tests.exec.drive import build_pipeline, gradients_by_name, run_pipelines
from tests.exec.model.test_families import MODELS, family_job
from tests.exec.runs import assert_same_training, calm_run, job, kinds
from tests.exec.tensor_workers import TensorWorkers, in_halves, whole_gradients
from tests.jobs import varied

STEPS = 7
FAMILIES = {"gpt": {"kind": "gpt", "config": {}}, **MODELS}
TOLERANCE = 3e-7
"""Of gradients against those without tensor parallelism, whose sums have another order."""


def run_job(model, tensor_parallel=1, shared="", pipelines=2, **train) -> Job:
    """A job whose tensor ranks share sequences or experts, if `shared` is "sequence" or "expert"."""
    small = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "ffn": 48}
    kept = {key: value for key, value in model.items() if key in ("config", "rotary_scaling")}
    keys = {key: value for key, value in (small | model).items() if key not in kept}
    tested_job = job(
        pipelines,
        2,
        2,
        kind=model["kind"],
        shape={"tensor_parallel": tensor_parallel} | ({f"{shared}_parallel": True} if shared else {}),
        model=keys,
        train={"clip": 1e9, **train},
        eval={"every": 3, "batches": 1},
    )
    return varied(tested_job, model=kept)


def struck_by(phase: str, killed: str) -> list[str]:
    """A death, a return, and a worker that stops in this phase: a generation begins with step 3, and an evaluation
    follows step 5."""
    step = {"evaluation": 5, "acknowledge": 3, "form": 3}.get(phase, 4)
    return [f"kill:{killed}@1", "rejoin:1.1@3", f"stop:0.0@{step}.{phase}"]


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("name", "phase", "ranks"),
    [
        ("expert bias", "reduce", 1),
        *(
            pytest.param(name, phase, 1, marks=SOAK)
            for name, phase in (
                ("gemma", "backward"),
                ("llama 3.1", "backward"),
                ("gpt", "evaluation"),
                ("gpt", "form"),
                ("qwen 3", "reduce"),
                ("qwen 3 moe", "step"),
                ("mixtral", "step"),
            )
        ),
        *(
            pytest.param(name, phase, 2, marks=SOAK)
            for name, phase in (("gpt", "forward"), ("qwen 3", "commit"), ("expert bias", "acknowledge"))
        ),
        pytest.param("mixtral, experts shared", "stepped", 2, marks=SOAK),
    ],
)
def test_run_with_kill_rejoin_and_stop_has_the_bits_of_the_calm_run(launch, name, phase, ranks):
    family, _, is_shared = name.partition(", ")
    tested_job = run_job(FAMILIES[family], ranks, "expert" if is_shared else "")
    struck = launch(tested_job, STEPS, *struck_by(phase, "1.1" if ranks == 1 else "1.1t1"))
    calm = calm_run(tested_job, launch, STEPS)
    assert kinds(struck).count("detected") == 2
    assert kinds(struck).count("rejoined") == 1
    assert sorted(calm.evaluations) == [2, 5, 6]
    assert_same_training(struck, calm)


@pytest.fixture(scope="module")
def pair():
    with TensorWorkers(2) as workers:
        yield workers


@pytest.mark.parametrize(
    ("name", "keys", "shared"),
    [
        ("qwen 3", {}, ""),
        ("mixtral", {"recompute": "layers"}, "expert"),
        ("mixtral", {}, "sequence"),
        ("expert bias", {}, "expert sequence"),
        ("gemma", {}, "sequence"),
        ("windows and sinks", {"recompute": "selective", "layers": 4}, ""),
        ("gpt", {"dropout": 0.2, "attention_dropout": 0.0}, ""),
        ("gpt", {"tied": True}, "sequence"),
        ("qwen 2", {"recompute": "full"}, "sequence"),
        ("llama", {"recompute": "layers"}, "sequence"),
    ],
)
def test_two_tensor_ranks_have_the_gradients_of_one(pair, name, keys, shared):
    tested_job = family_job({"layers": 2} | FAMILIES[name] | keys, micro_batches=2)
    stages = build_pipeline(tested_job)
    loss = run_pipelines([stages], 0, tested_job.shape.micro_batches)
    gradients = in_halves(gradients_by_name(stages), stages)
    sharing = {f"{each}_parallel": True for each in shared.split()}
    parted = varied(tested_job, grid={"tensor_parallel": 2} | sharing)
    parts = pair.iterate(parted)
    assert parts[0].report.loss == parts[1].report.loss == pytest.approx(loss, rel=1e-6)
    whole = whole_gradients(parts)
    assert {key: tuple(g.shape) for key, g in whole.items()} == {key: tuple(g.shape) for key, g in gradients.items()}
    assert 0 < max(float((whole[key] - gradients[key]).abs().max()) for key in gradients) < TOLERANCE
    apart = pair.iterate(parted, weights_last=True)
    assert [part.digests for part in parts] == [part.digests for part in apart]
    assert [part.report.norms for part in parts] == [part.report.norms for part in apart]


def test_run_resumes_with_and_without_shared_experts(launch, tmp_path):
    """Checkpoints are the same for any distribution of experts, moments and step counts included."""
    model, directory, keys = FAMILIES["mixtral"], tmp_path / "run", {"pipelines": 1, "checkpoint_every": 1}
    jobs = {True: run_job(model, 2, "expert", **keys), False: run_job(model, **keys)}
    for steps, is_shared in ((1, True), (2, False), (3, True)):
        result = launch(jobs[is_shared], steps, directory=directory, resume=steps > 1)
    calm = run(one_f_one_b(jobs[False].shape), jobs[False], steps=3)
    for key, tolerance in (("loss", 1e-6), ("grad_norm", 1e-5)):
        assert [line[key] for line in result.metrics] == pytest.approx([line[key] for line in calm.metrics], tolerance)
