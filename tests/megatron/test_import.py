"""`import-megatron` loses no row, compares the whole model with the job's, and says what it refuses."""

from __future__ import annotations

import enum
import pickle
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from recycle import Job
from recycle.job.initial_weights import model_of_checkpoint
from recycle.job.sections import ModelSection, ShapeSection
from tests.cli.command import Command
from tests.cli.conftest import command as command
from tests.exec.drive import build_stage
from tests.hugging_face.written import write_model

MODEL: dict[str, Any] = {
    **{"kind": "llama", "layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocabulary": 512, "sequence": 16},
    "config": {"num_query_groups": 2},
}
ARGUMENTS: dict[str, Any] = {
    **{"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 8},
    **{"norm_epsilon": 1e-5, "normalization": "RMSNorm", "swiglu": True, "squared_relu": False, "rotary_base": 10000},
    **{"rotary_percent": 1.0, "use_rope_scaling": False, "rope_scaling_factor": 8.0, "position_embedding_type": "rope"},
    **{"untie_embeddings_and_output_weights": True, "ffn_hidden_size": 64, "moe_router_topk": 2, "num_experts": None},
    **{"apply_layernorm_1p": False, "moe_ffn_hidden_size": None, "window_size": None},
}
"""What Megatron-LM's script keeps of `MODEL`."""
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def part() -> Any:
    """megatron-core's model with all layers."""
    job = Job(grid=ShapeSection(1, 1, 1), model=ModelSection(**MODEL))
    return build_stage(job, 0)._part.module


@pytest.fixture
def write(part: Any, tmp_path: Path) -> Write:
    """Writes the model as a checkpoint of Megatron's, with what `common.pt` holds beside."""
    from recycle.megatron.torch_dist import write as write_checkpoint

    def write_to(name: str = "there", **beside: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write_checkpoint(folder, [("", part)], 3, beside)
        return folder

    return write_to


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """Writes a job file of the model, without `vocabulary` where that is None."""

    def write_job(vocabulary: int | None = 512) -> Path:
        model = ModelSection(**(MODEL | {"vocabulary": vocabulary or 512}))
        text = Job(grid=ShapeSection(1, 1, 1), model=model).to_toml()
        path = tmp_path / "job.toml"
        path.write_text(text if vocabulary else text.replace("vocabulary = 512\n", ""))
        return path

    return write_job


@pytest.mark.parametrize(
    ("stated", "size", "left_out"),
    [
        ({}, None, 0),
        ({}, 512, 0),
        ({}, 500, 12),
        ({}, 384, None),
        ({}, 256, None),
        ({}, 513, None),
        ({"make_vocab_size_divisible_by": 64, "tensor_model_parallel_size": 4}, 257, 255),
        ({"make_vocab_size_divisible_by": 64, "tensor_model_parallel_size": 1}, 440, None),
        ({"vocab_size": 510}, 500, None),
        ({"vocab_size": 510}, 511, 1),
    ],
)
def test_no_more_rows_are_left_out_than_pad_the_vocabulary(
    write: Write,
    job: Callable[..., Path],
    command: Command,
    tmp_path: Path,
    stated: dict[str, int],
    size: int | None,
    left_out: int | None,
) -> None:
    there, target = write(args=Namespace(**stated)), tmp_path / "target"
    arguments = ("import-megatron", there, "--job", job(size), "-o", target, "--json")
    if left_out is None:
        assert command(*arguments).refused("512")
        assert not target.exists()
        return
    assert command(*arguments).json["left_out_rows"] == left_out
    assert model_of_checkpoint(target).vocabulary == 512 - left_out


def test_a_run_needs_the_vocabulary_in_its_job(
    write: Write, job: Callable[..., Path], command: Command, tmp_path: Path
) -> None:
    arguments = ("--job", job(None), "--run", "-o", tmp_path / "target")
    assert command("import-megatron", write(), *arguments).refused("[model] vocabulary")


@pytest.mark.parametrize(
    ("stated", "key"),
    [
        ({"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 4}, "[model] heads"),
        ({"group_query_attention": False, "num_query_groups": 1}, "num_query_groups"),
        ({"rotary_base": 500000}, "[model] rotary_base"),
        ({"rotary_percent": 0.5}, "rotary_percent"),
        ({"norm_epsilon": 1e-6}, "layernorm_epsilon"),
        ({"swiglu": False}, "activation_func"),
        ({"use_rope_scaling": True}, "[model] rotary_scaling"),
        ({"position_embedding_type": "none"}, "[model] kind"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p"),
        ({"window_size": (16, 0)}, "window_size"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_a_model_of_equal_shapes_is_refused_by_its_arguments(
    write: Write, job: Callable[..., Path], command: Command, tmp_path: Path, stated: dict[str, Any], key: str
) -> None:
    there = write(args=Namespace(**(ARGUMENTS | stated)))
    assert command("import-megatron", there, "--job", job(), "-o", tmp_path / "target").refused(key)


def test_what_no_argument_states_is_named(
    write: Write, job: Callable[..., Path], command: Command, tmp_path: Path
) -> None:
    def unstated(name: str, **beside: Any) -> set[str]:
        there = write(name, **beside)
        told = command("import-megatron", there, "--job", job(), "-o", tmp_path / f"{name}-target", "--json").json
        return {text.partition(" = ")[0] for text in told["unstated"]}

    assert unstated("whole", args=Namespace(**ARGUMENTS)) == set()
    assert unstated("none") >= {"heads", "num_query_groups", "rotary_base", "layernorm_epsilon", "activation_func"}
    few = {key: value for key, value in ARGUMENTS.items() if key not in ("rotary_base", "norm_epsilon")}
    assert unstated("few", args=Namespace(**few)) == {"rotary_base", "layernorm_epsilon"}


def test_an_export_states_its_whole_model(command: Command, tmp_path: Path) -> None:
    weights, there, path = tmp_path / "weights", tmp_path / "there", tmp_path / "job.toml"
    command("import-hf", write_model(tmp_path / "model"), "-o", weights)
    command("export-megatron", weights, "-o", there)
    model = model_of_checkpoint(weights)

    def imported(**changes: Any) -> Any:
        changed = msgspec.structs.replace(model, **changes)
        path.write_text(Job(grid=ShapeSection(1, 1, 1), model=changed).to_toml())
        return command("import-megatron", there, "--job", path, "-o", tmp_path / "target", "--json")

    heads = model.config | {"num_query_groups": 2, "kv_channels": 2}
    assert imported(heads=4, config=heads).refused("num_attention_heads = 2")
    assert imported(rotary_base=5e5).refused("rotary_base = 10000")
    assert imported(vocabulary=39).refused("40 rows")
    assert imported().json["unstated"] == []


class _Shape(enum.Enum):
    SQUARE = 1


class _Runs:
    """An object whose pickle calls a function."""

    def __reduce__(self) -> Any:
        return pickle.dumps, ("ran",)


def test_arguments_are_read_beside_objects_whose_code_does_not_run(
    write: Write, job: Callable[..., Path], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = write(args=Namespace(**ARGUMENTS, shape=_Shape.SQUARE, dtype=torch.bfloat16, other=_Runs()))

    def fail(*_: Any) -> None:
        raise AssertionError("code of the checkpoint ran")

    monkeypatch.setattr(pickle, "dumps", fail)
    from recycle.megatron.arguments import common_state, stated_arguments

    stated = stated_arguments(common_state(there / "iter_0000003"))
    assert stated["num_attention_heads"] == 4
    assert not {"shape", "other"} & set(stated)


@pytest.mark.process
def test_nothing_but_our_own_lines_is_printed(write: Write, job: Callable[..., Path], tmp_path: Path) -> None:
    command = (sys.executable, "-m", "recycle", "import-megatron", write(), "--job", job(), "-o", tmp_path / "target")
    told = subprocess.run(command, capture_output=True, check=True, text=True)
    assert told.stderr == ""
    assert len(told.stdout.splitlines()) == 3


@pytest.mark.parametrize("tensor", ["decoder.layers.self_attention.linear_qkv.bias", "output_layer.bias"])
def test_a_tensor_that_the_job_does_not_have_is_refused(
    part: Any, job: Callable[..., Path], command: Command, tmp_path: Path, tensor: str
) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    inside = tmp_path / "iter_0000003"
    state = {f"{name}": torch.zeros(2) for name in (tensor, "embedding.word_embeddings.weight")}
    save(state, storage_writer=FileSystemWriter(inside), no_dist=True)
    (inside / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert command("import-megatron", inside, "--job", job(), "-o", tmp_path / "target").refused("iter_0000003: ")


@pytest.fixture
def spoiled(part: Any) -> Iterator[None]:
    parameter = next(part.parameters())
    before = parameter.detach().clone()
    parameter.data[0, 0] = float("nan")
    yield
    parameter.data.copy_(before)


@pytest.mark.usefixtures("spoiled")
def test_weights_that_are_not_finite_are_refused(
    write: Write, job: Callable[..., Path], command: Command, tmp_path: Path
) -> None:
    told = command("import-megatron", write(), "--job", job(), "-o", tmp_path / "target")
    assert told.refused("embedding.word_embeddings.weight")
    assert not (tmp_path / "target").exists()


def test_a_damaged_checkpoint_is_one_line_that_names_the_file(
    write: Write, job: Callable[..., Path], command: Command, tmp_path: Path
) -> None:
    there, arguments = write(), ("--job", job(), "-o", tmp_path / "target")
    inside = there / "iter_0000003"
    data, index = inside / "__0_0.distcp", inside / ".metadata"
    content = data.read_bytes()
    data.write_bytes(content[:1000])
    assert command("import-megatron", there, *arguments).refused("__0_0.distcp: cut off, 1000 bytes")
    data.write_bytes(content[:100] + bytes(len(content) - 100))
    assert command("import-megatron", there, *arguments).refused("iter_0000003: cannot be read (")
    data.unlink()
    assert command("import-megatron", there, *arguments).refused("__0_0.distcp: missing")
    index.write_bytes(index.read_bytes()[:200])
    assert command("import-megatron", there, *arguments).refused(".metadata: ")
    (there / "latest_checkpointed_iteration.txt").write_text("9")
    told = command("import-megatron", there, *arguments)
    assert told.refused("latest_checkpointed_iteration.txt: ", "iter_0000009", str(inside))
    (there / "latest_checkpointed_iteration.txt").write_text("9" * 5000)
    assert command("import-megatron", there, *arguments).refused("latest_checkpointed_iteration.txt: ", str(inside))


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        (("mp_rank_00/model_optim_rng.pt",), "--ckpt-convert-format torch_dist"),
        (("mp_rank_00_000/model_optim_rng.pt",), "--ckpt-convert-format torch_dist"),
        ((".metadata", "__0_0.distcp"), "recycle import-hf"),
        (("config.json", "model.safetensors"), "recycle import-hf"),
        (("manifest.json",), "[model] weights"),
        (("iter_0000005/metadata.json",), "iter_0000005"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_another_kind_of_checkpoint_is_recognised(
    job: Callable[..., Path], command: Command, tmp_path: Path, files: tuple[str, ...], remedy: str
) -> None:
    folder = tmp_path / "other"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    assert command("import-megatron", folder, "--job", job(), "-o", tmp_path / "target").refused("other: ", remedy)
