"""Megatron-LM's own pretraining script in a session, where it is installed, and the parts that need no Megatron-LM."""

import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from recycle import Job, RunError
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import RunResult, train

STEPS, BATCH = 6, 16
JOB, JOB_OF_TENSOR_RANKS = (
    Job.from_toml(
        f"[shape]\npipelines = 2\nranks = 2\nmicro_batches = 4\ntensor_parallel = {count}\n[model]\ntied = true\n"
        "[planner]\nsteps = 1\n[train]\nsteps = 6\n"
    )
    for count in (1, 2)
)
ARGUMENTS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    f" --micro-batch-size 2 --global-batch-size {BATCH} --train-iters {STEPS} --lr 1e-3 --lr-warmup-iters 2"
    " --pipeline-model-parallel-size 2 --transformer-impl local --use-cpu-initialization --no-persist-layer-norm"
    " --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion"
    " --attention-softmax-in-fp32 --tokenizer-type NullTokenizer"
    " --vocab-size 127 --mock-data --num-workers 0 --log-interval 1 --eval-interval 2 --eval-iters 1"
    " --distributed-backend gloo --save-interval 2 --timing-log-level 2"  # its timers make barriers
).split()


SHARDED = (
    "--use-distributed-optimizer --num-distributed-optimizer-instances 2"
    " --overlap-grad-reduce --overlap-param-gather"  # which a session switches off
)
EXPERTS = (
    " --tensor-model-parallel-size 2 --sequence-parallel --num-experts 4 --moe-router-topk 2"
    " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"
    " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --disable-bias-linear --ffn-hidden-size 128"
)


def installed_script() -> Path | None:
    """pretrain_gpt.py of Megatron-LM: in $RECYCLE_MEGATRON_LM, or next to an importable megatron.training."""
    folder = os.environ.get("RECYCLE_MEGATRON_LM")
    spec = None if folder else find_spec("megatron") and find_spec("megatron.training")
    if spec is not None and spec.origin is not None:
        folder = str(Path(spec.origin).parents[2])
    script = None if folder is None else Path(folder) / "pretrain_gpt.py"
    return script if script is not None and script.is_file() else None


@pytest.fixture
def script():
    found = installed_script()
    if found is None:
        pytest.skip("no Megatron-LM: set RECYCLE_MEGATRON_LM to a checkout of core_v0.16.1")
    return found


def pretrain(server, script: Path, directory: Path, *faults: str, options: tuple[str, ...] = ()) -> RunResult:
    return train(
        JOB_OF_TENSOR_RANKS if "--tensor-model-parallel-size" in options else JOB,
        directory,
        faults=[parse_fault(fault) for fault in faults],
        planner=plan_for_training,
        server=server,
        command=[sys.executable, "-m", "recycle.megatron", str(script), *ARGUMENTS, *options],
    )


def logged(result: RunResult, worker: str) -> dict[str, float]:
    """Losses that the script prints, by iteration or validation; with tensor ranks the last one prints them."""
    text = "".join(path.read_text() for path in (result.directory / "logs").glob(f"{worker}*.log"))
    pattern = r"(iteration +\d+/|validation loss at .*?\|).*? lm loss(?: value)?: (\S+) "
    return {what: float(loss) for what, loss in re.findall(pattern, text)}


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ("", "torch_dist"),
        (SHARDED, "torch"),
        *(
            pytest.param(*values, marks=pytest.mark.soak)
            for values in (("", "torch"), (SHARDED, "torch_dist"), (SHARDED + EXPERTS, "torch_dist"))
        ),
    ],
)
def test_megatron_lms_script_survives_deaths_with_its_checkpoints_and_continues_from_one(
    settings, form, script, servers, tmp_path
):
    server, saved = servers["gpt"], tmp_path / "saved"
    options = *settings.split(), "--ckpt-format", form
    calm = pretrain(server, script, tmp_path / "calm", options=options)
    faults = "kill:0.0@1.backward", "kill:1.1@3.commit", "rejoin:0.0@3", "rejoin:1.1@5", "kill:0.1@5.stepped"
    result = pretrain(server, script, tmp_path / "run", *faults, options=(*options, "--save", str(saved)))
    assert result.losses == calm.losses
    assert result.digests == {worker: calm.digests[worker] for worker in ("0.0", "1.0", "1.1")}
    printed, stand_in = logged(calm, "1.1"), logged(result, "0.1")  # which prints while 1.1 is dead
    returned = logged(result, "1.1")
    assert list(returned)[-3:] == list(printed)[-3:]  # up to the test after the last save
    assert returned == pytest.approx({what: printed[what] for what in returned}, rel=1e-6)
    assert len(printed) == STEPS + STEPS // 2 + 2
    assert {"iteration        4/", "iteration        5/"} <= stand_in.keys()
    assert stand_in == pytest.approx({what: printed[what] for what in stand_in}, rel=1e-6)
    parts = "iter_*/*/model_optim_rng.pt" if form == "torch" else "iter_*/__*_0.distcp"
    assert len(list(saved.glob(parts))) == STEPS // 2 * 2 * (2 if EXPERTS in settings else 1)
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    options = *options, "--load", str(saved), "--exit-interval", "5", "--exit-signal-handler"
    again = pretrain(server, script, tmp_path / "again", options=options)
    assert again.losses == calm.losses[2:5]
    assert again.ended_early


@pytest.mark.slow  # imports megatron-core
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pipeline_model_parallel_size": 4}, r"pipeline-parallel size 4, .* \[shape\] ranks = 2"),
        ({"data_parallel_size": 1}, r"data-parallel size 1, .* \[shape\] pipelines = 2"),
        ({"virtual_pipeline_model_parallel_size": 2}, r"size 2, .* \[shape\] chunks = 1"),
        ({"global_batch_size": 32}, r"micro-batches 8, .* \[shape\] micro_batches = 4"),
        ({"train_iters": None, "train_samples": 80}, r"iterations 5, .* \[train\] steps = 6"),
        ({"rampup_batch_size": [4, 4, 64]}, "--rampup-batch-size"),
        ({"dataloader_type": "external"}, "--dataloader-type external"),
        ({"save": "folder", "ckpt_format": "torch_dcp"}, "--ckpt-format torch_dcp"),
    ],
)
def test_arguments_that_differ_from_the_job_are_refused(changes, named):
    from recycle.megatron.pretrain import require_fit

    sizes = {"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "virtual_pipeline_model_parallel_size": None}
    batches = {"micro_batch_size": 2, "global_batch_size": BATCH, "train_iters": STEPS, "train_samples": None}
    arguments = {**sizes, **batches, "dataloader_type": "single", "save": None, "ckpt_format": "torch_dist"}
    require_fit("pretrain_gpt.py", SimpleNamespace(**arguments), JOB)
    with pytest.raises(RunError, match=named):
        require_fit("pretrain_gpt.py", SimpleNamespace(**{**arguments, **changes}), JOB)


def test_samples_are_read_on_and_read_again_for_any_rank():
    from megatron.core import parallel_state

    from recycle.megatron.pretrain import Samples

    opened = []

    class Loader:
        batch_sampler = SimpleNamespace(micro_batch_times_data_parallel_size=4)

        def __init__(self, dataset: range, consumed: int):
            self._rows, self._rank = dataset[consumed:], parallel_state.get_data_parallel_rank()
            opened.append((consumed, self._rank))

        def __iter__(self) -> Iterator[list[int]]:
            for at in range(2 * self._rank, len(self._rows), 4):
                yield list(self._rows[at : at + 2])

    training = SimpleNamespace(
        build_pretraining_data_loader=Loader, get_args=lambda: SimpleNamespace(dataloader_type="single")
    )
    samples = Samples(training, range(100), 8)

    def read(pipeline):
        reader = samples.iterator(pipeline)
        return [next(reader) for _ in range(2)]

    assert read(1) == [[10, 11], [14, 15]]
    assert read(1) == [[10, 11], [14, 15]]  # as after a failure
    samples.position += 8
    assert read(1) == [[18, 19], [22, 23]]
    assert read(0) == [[16, 17], [20, 21]]
    assert opened == [(8, 1), (8, 1), (16, 0)]
