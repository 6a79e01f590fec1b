"""Weights that were trained here go to Megatron's own checkpoint format and back, to the bit, at any T, P and V."""

import json
import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recycle import Job, RecycleError
from recycle.exec.launch.launcher import train
from recycle.exec.model.stored_tensors import StoredTensors
from recycle.ir.families import one_f_one_b
from tests.cli.conftest import command as command, working_directory as working_directory
from tests.exec.runs import figures, lines_of
from tests.megatron.jobs import Case, Jobs, build

JOB = """
[membership]
dead_after = 20.0
[shape]
pipelines = 1
ranks = 2
micro_batches = 2
tensor_parallel = 2
[model]
kind = "{kind}"
layers = 4
hidden = 64
heads = 4
vocabulary = 256
sequence = 32
[train]
learning_rate = 1e-2
checkpoint_every = 2
"""
EXPERTS = {
    "num_moe_experts": 4,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}
BIAS = "decoder.layers.{}.mlp.router.expert_bias"
COUNTS = {"gpt": 53, "llama": 27}
"""Parameters of the whole model."""


@pytest.fixture(scope="module")
def jobs():
    with Jobs(4) as started:
        yield started


@pytest.fixture(scope="module", params=[pytest.param("gpt", marks=pytest.mark.soak), "llama"])
def ran(request, servers, tmp_path_factory):
    """A run of four steps, of two pipeline and two tensor ranks; its job is in the same folder."""
    path = tmp_path_factory.mktemp(request.param) / "job.toml"
    path.write_text(JOB.format(kind=request.param))
    job = Job.load(path)
    return train(job, path.with_name("run"), steps=4, schedule=one_f_one_b(job.shape), server=servers[request.param])


@pytest.fixture(scope="module")
def trained(ran):
    """The checkpoint after two steps."""
    return ran.directory / "checkpoints" / "step-00000001"


@pytest.fixture
def exported(trained, command):
    """The iteration's folder of its export to `there`."""
    output = command(f"export-megatron {trained} -o there --json").json
    assert (output["iteration"], output["moments"]) == (2, True)
    return Path("there/iter_0000002").resolve()


def case_of(checkpoint: Path, **sizes) -> Case:
    kind = Job.load(checkpoint.parents[2] / "job.toml").model.kind
    return Case(None, model={"kind": kind, "layers": 4}, **sizes)


def _loaded(case: Case, folder: Path):
    """This process's chunks, with what megatron-core's own loader reads."""
    from megatron.core import dist_checkpointing, parallel_state

    chunks, _ = build(case)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(7.0)
    metadata = {"dp_cp_group": group}
    state = {
        f"model{number}": chunk.module.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)
    }
    read = dist_checkpointing.load(state, str(folder))
    assert read["iteration"] == int(folder.name[-7:])
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(read[f"model{number}"])
    return chunks


def _loads_as_here(folder: Path, checkpoint: Path, case: Case) -> int:
    """Parameters of this process that are the bits which recycle reads from its own checkpoint; else -1."""
    from megatron.core import parallel_state

    from recycle.exec.model.weights import read_weights

    equal = 0
    for chunk in _loaded(case, folder):
        first_layer = chunk.module.decoder.layers[0].layer_number - 1
        read = {name: parameter.detach().clone() for name, parameter in chunk.module.named_parameters()}
        rank = parallel_state.get_tensor_model_parallel_rank()
        read_weights(chunk.module, checkpoint, first_layer, rank, case.tensor_parallel)
        for name, parameter in chunk.module.named_parameters():
            if not torch.equal(parameter, read[name]):
                return -1
            equal += 1
    return equal


@pytest.mark.parametrize(
    "sizes",
    [
        {"ranks": 1},
        pytest.param({"ranks": 4}, marks=pytest.mark.soak),
        pytest.param({"ranks": 1, "tensor_parallel": 4}, marks=pytest.mark.soak),
        {"ranks": 2, "tensor_parallel": 2, "chunks": 2},
    ],
    ids=["whole", "P = 4", "T = 4", "T = P = V = 2"],
)
def test_megatron_loads_exported_checkpoints(jobs, trained, exported, sizes):
    assert (exported.parent / "latest_checkpointed_iteration.txt").read_text() == "2"
    case = case_of(trained, **sizes)
    equal = jobs.call(partial(_loads_as_here, exported, trained), case)
    assert min(equal) > 0
    assert sum(equal) == COUNTS[case.model["kind"]] * case.tensor_parallel


def _save(state, back: Path):
    """Megatron's own saver writes the state, split as this process has it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._process_memory = lambda: 0  # it only logs that, and asks a package that recycle does without
    if torch.distributed.get_rank() == 0:
        back.mkdir()
    torch.distributed.barrier()
    multiprocessing.current_process()._config["daemon"] = False  # the saver has a process that writes
    dist_checkpointing.save(state, str(back))
    for child in multiprocessing.active_children():
        child.terminate()
    filesystem_async._results_queue = None


def assert_same_tensors(original: Path, back: Path, least: int):
    """All tensors of a checkpoint that came back are those that were trained here."""
    before, after = (StoredTensors(sorted(folder.glob("*.safetensors")), RecycleError) for folder in (original, back))
    assert len(after.places) > least
    for name, place in after.places.items():
        assert torch.equal(before.whole(name, place.shape), after.read(name)), name


def _optimizer_of(chunks):
    """megatron-core's own optimizer for fp32 parameters."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, clip_grad=0.0), chunks)


def _with_optimizer(exported: Path, case: Case) -> tuple[Any, Any, dict[str, Any]]:
    """The chunk, its optimizer and their state, as megatron-core's own loader fills both."""
    from megatron.core import dist_checkpointing, parallel_state

    (chunk,) = _loaded(case, exported)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    optimizer = _optimizer_of([chunk])
    model = chunk.module.sharded_state_dict(metadata=metadata)
    state = {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)}
    optimizer.load_state_dict(dist_checkpointing.load(state, str(exported))["optimizer"])
    return chunk, optimizer, metadata


def _saved_with_optimizer(exported: Path, back: Path, case: Case):
    chunk, optimizer, metadata = _with_optimizer(exported, case)
    model = chunk.module.sharded_state_dict(metadata=metadata)
    _save({"model": model, "optimizer": optimizer.sharded_state_dict(model, metadata=metadata), "iteration": 2}, back)


def test_run_continues_from_megatrons_checkpoint_with_the_same_bits(jobs, ran, trained, exported, command, servers):
    """Weights, moments and step count: two more iterations have the losses and norms of a run that never left."""
    back, run, path = Path("iter_0000002").resolve(), Path("run").resolve(), trained.parents[2] / "job.toml"
    case = case_of(trained, ranks=1, tensor_parallel=2)
    jobs.call(partial(_saved_with_optimizer, exported, back), case)
    lines = command(f"import-megatron {back} --job {path} --run -o run").out.splitlines()
    assert lines[-1] == f"resume with: recycle train {path} --resume --run run"
    assert_same_tensors(trained, run / "checkpoints" / trained.name, 60)
    job = Job.load(path)
    more = {"schedule": one_f_one_b(job.shape), "server": servers[case.model["kind"]]}
    train(job, run, steps=3, resume=True, **more)
    resumed = train(job, run, steps=4, resume=True, **more)
    metrics = lines_of(run, "metrics")
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in metrics] == figures(ran)[2:]
    assert resumed.digests == ran.digests


def _saved_layer_by_layer(exported: Path, back: Path, case: Case) -> list[list[float]]:
    """Expert biases that megatron-core's loader reads; its saver then writes each layer under names of its own."""
    chunk, optimizer, metadata = _with_optimizer(exported, case)
    metadata["non_homogeneous_layers"] = True
    model = chunk.module.sharded_state_dict(metadata=metadata)
    assert any(getattr(piece, "key", None) == BIAS.format(3) for piece in model.values())
    _save({"model": model, "optimizer": optimizer.sharded_state_dict(model, metadata=metadata), "iteration": 3}, back)
    return [layer.mlp.router.expert_bias.tolist() for layer in chunk.module.decoder.layers]


def test_expert_bias_goes_to_megatron_and_back(jobs, command, servers):
    """Here it is a parameter that Adam does not update, there a buffer without moments."""
    fields = "".join(f"{name} = {json.dumps(value)}\n" for name, value in EXPERTS.items())
    text = (
        JOB.format(kind="mixtral")
        .replace("tensor_parallel = 2", "tensor_parallel = 1")
        .replace("every = 2", "every = 3")
    )
    Path("job.toml").write_text(text.replace("[train]", f"[model.config]\n{fields}[train]"))
    job, run, back = Job.load(Path("job.toml")), Path("run").resolve(), Path("iter_0000003").resolve()
    # An odd number of steps: a bias that only swings is back at 0 after every second.
    train(job, run, steps=3, schedule=one_f_one_b(job.shape), server=servers["mixtral"])
    checkpoint = run / "checkpoints" / "step-00000002"
    assert command(f"export-megatron {checkpoint} -o there --json").json["moments"]
    case = Case(None, ranks=1, model={"kind": "mixtral", "layers": 4, "config": EXPERTS})
    (biases,) = jobs.call(partial(_saved_layer_by_layer, Path("there/iter_0000003").resolve(), back), case)
    stored = StoredTensors(sorted(checkpoint.glob("*.safetensors")), RecycleError)
    assert biases == [stored.read(BIAS.format(layer)).tolist() for layer in range(4)]
    assert any(biases[3])
    assert command(f"import-megatron {back} --job job.toml --run -o back").status == 0
    assert_same_tensors(checkpoint, Path("back/checkpoints") / checkpoint.name, 100)


def test_bad_input_is_refused(trained, exported, command):
    job = trained.parents[2] / "job.toml"
    Path("other.toml").write_text(job.read_text().replace("layers = 4", "layers = 2"))
    Path("mine").symlink_to(exported)
    Path("zarr").mkdir()
    Path("zarr/metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert command(f"import-megatron there --job {job} -o weights").status == 0
    assert not command("export-megatron weights -o bare --json").json["moments"]
    for line, message in (
        (f"export-megatron {trained} -o there", "there: exists already; remove it"),
        (f"import-megatron none --job {job} -o target", "none: "),
        (f"import-megatron bare --job {job} -o target --run", "has no moments of an optimizer"),
        (f"import-megatron mine --job {job} -o target --run", "name it iter_0000012"),
        ("import-megatron there --job other.toml -o target", "by the job's [model] it is [2"),
        ("import-megatron zarr --job other.toml -o target", "is of the format 'zarr'"),
    ):
        assert command(line).refused(message)
    assert not Path("target").exists()
