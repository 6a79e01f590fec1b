"""`import-megatron` loses no row, compares the whole model with the job's, and says what it refuses."""

import enum
import pickle
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from recycle import Job
from recycle.job.manifest import model_of_checkpoint
from recycle.job.sections import ModelSection, ShapeSection
from tests.cli.command import Command, Outcome
from tests.cli.conftest import command as command, working_directory as working_directory
from tests.exec.drive import build_stage
from tests.hugging_face.written import write_model

NEWEST = "latest_checkpointed_iteration.txt"
MODEL = {
    **{"kind": "llama", "layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocabulary": 512, "sequence": 16},
    "config": {"num_query_groups": 2},
}
ARGUMENTS = {
    **{"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 8},
    **{"norm_epsilon": 1e-5, "normalization": "RMSNorm", "swiglu": True, "squared_relu": False, "rotary_base": 10000},
    **{"rotary_percent": 1.0, "use_rope_scaling": False, "rope_scaling_factor": 8.0, "position_embedding_type": "rope"},
    **{"untie_embeddings_and_output_weights": True, "ffn_hidden_size": 64, "moe_router_topk": 2, "num_experts": None},
    **{"apply_layernorm_1p": False, "moe_ffn_hidden_size": None, "window_size": None},
}
"""What Megatron-LM's script keeps of `MODEL`."""
TARGET = Path("target")


@pytest.fixture(scope="module")
def part():
    """megatron-core's model with all layers."""
    job = Job(grid=ShapeSection(1, 1, 1), model=ModelSection(**MODEL))
    return build_stage(job, 0)._part.module


def write_job(model: ModelSection):
    Path("job.toml").write_text(Job(grid=ShapeSection(1, 1, 1), model=model).to_toml())


class Import:
    """Imports a checkpoint of Megatron's into `target`, by a job of the model."""

    def __init__(self, part, command: Command):
        self._part, self._command = part, command
        write_job(ModelSection(**MODEL))

    def write(self, **further) -> Path:
        """The model's checkpoint, with further content of `common.pt`; returns the folder of the iteration."""
        from recycle.megatron.torch_dist import write

        folder = Path(tempfile.mkdtemp(dir="."))
        write(folder, [("", self._part)], 3, further)
        return folder / "iter_0000003"

    def __call__(self, folder: Path | None = None, options="", **stated) -> Outcome:
        """The command's outcome for that checkpoint, or one of the model that states these arguments."""
        folder = folder or self.write(args=Namespace(**stated)).parent
        return self._command(f"import-megatron {folder} --job job.toml -o {TARGET} --json {options}")


@pytest.fixture
def imported(part, command):
    return Import(part, command)


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
def test_only_padding_rows_are_dropped(imported, stated, size, left_out):
    text = Path("job.toml").read_text()
    Path("job.toml").write_text(text.replace("vocabulary = 512\n", f"vocabulary = {size}\n" if size else ""))
    outcome = imported(**stated)
    if left_out is None:
        assert outcome.refused("512")
        assert not TARGET.exists()
        return
    assert outcome.json["left_out_rows"] == left_out
    assert model_of_checkpoint(TARGET).vocabulary == 512 - left_out


def test_importing_a_run_needs_the_vocabulary(imported):
    Path("job.toml").write_text(Path("job.toml").read_text().replace("vocabulary = 512\n", ""))
    assert imported(options="--run").refused("[model] vocabulary")


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
def test_model_of_equal_shapes_with_other_arguments_is_refused(imported, stated, key):
    assert imported(**(ARGUMENTS | stated)).refused(key)


@pytest.mark.parametrize(
    ("left_out", "unstated"),
    [((), ()), (("rotary_base", "norm_epsilon"), ("rotary_base", "layernorm_epsilon"))],
)
def test_unstated_arguments_are_named(imported, left_out, unstated):
    output = imported(**{key: value for key, value in ARGUMENTS.items() if key not in left_out}).json["unstated"]
    assert {text.partition(" = ")[0] for text in output} == set(unstated)


def test_without_arguments_all_undetermined_keys_are_named(imported):
    output = {text.partition(" = ")[0] for text in imported(imported.write()).json["unstated"]}
    assert output >= {"heads", "num_query_groups", "rotary_base", "layernorm_epsilon", "activation_func"}


def test_an_export_states_its_whole_model(imported, command):
    command(f"import-hf {write_model(Path('model'))} -o weights")
    command("export-megatron weights -o there")
    model = model_of_checkpoint(Path("weights"))
    heads = model.config | {"num_query_groups": 2, "kv_channels": 2}
    for changes, message in (
        ({"heads": 4, "config": heads}, "num_attention_heads = 2"),
        ({"rotary_base": 5e5}, "rotary_base = 10000"),
        ({"vocabulary": 39}, "40 rows"),
    ):
        write_job(msgspec.structs.replace(model, **changes))
        assert imported(Path("there")).refused(message)
    write_job(model)
    assert imported(Path("there")).json["unstated"] == []


def hybrid_model(monkeypatch: pytest.MonkeyPatch):
    """megatron-core's hybrid model with an attention layer and a feed-forward layer per layer of `MODEL`.

    Its last norm is Transformer Engine's; torch's takes its place.
    """
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from recycle.exec.model.config import transformer_config
    from recycle.exec.model.fused import fuse, stay_on_device
    from recycle.exec.model.gpt import layer_spec

    job = Job(grid=ShapeSection(1, 1, 1), model=ModelSection(**MODEL))
    config = transformer_config(job, num_layers=2 * job.model.layers)
    both = layer_spec(config).submodules
    attention = replace(both, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    feed_forward = replace(both, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)
    layers = mamba_block.MambaStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=feed_forward),
    )
    monkeypatch.setattr(sys.modules[mamba_block.MambaStack.__module__], "TENorm", WrappedTorchNorm)
    model = MambaModel(
        config,
        mamba_stack_spec=ModuleSpec(mamba_block.MambaStack, submodules=layers),
        vocab_size=512,
        max_sequence_length=16,
        hybrid_override_pattern="*-" * job.model.layers,
        position_embedding_type="rope",
    )
    fuse(model)
    stay_on_device(model)
    return model


@torch.no_grad()
def test_checkpoint_of_a_hybrid_model_is_a_model_of_equal_outputs(imported, monkeypatch):
    from recycle.exec.model.gpt import build_part
    from recycle.megatron.torch_dist import write

    hybrid = hybrid_model(monkeypatch)
    torch.manual_seed(0)
    for parameter in hybrid.parameters():
        parameter.normal_(0.0, 0.1)
    write(Path(), [("", hybrid)], 3, {"args": Namespace(**ARGUMENTS)})
    assert imported(Path("iter_0000003")).json["unstated"] == []
    gpt = build_part(Job(grid=ShapeSection(1, 1, 1), model=ModelSection(**MODEL, weights=str(TARGET))), 0)
    tokens = torch.arange(16)[None] * 7
    logits = [model(input_ids=tokens, position_ids=tokens, attention_mask=None) for model in (hybrid, gpt)]
    assert torch.equal(*logits)


class _Shape(enum.Enum):
    SQUARE = 1


class _Runs:
    """An object whose pickle calls a function."""

    def __reduce__(self):
        return pickle.dumps, ("ran",)


def test_code_in_pickles_does_not_run(imported, monkeypatch):
    folder = imported.write(args=Namespace(**ARGUMENTS, shape=_Shape.SQUARE, dtype=torch.bfloat16, other=_Runs()))

    def fail(*_):
        raise AssertionError("code of the checkpoint ran")

    monkeypatch.setattr(pickle, "dumps", fail)
    from recycle.megatron.arguments import common_state, stated_arguments

    stated = stated_arguments(common_state(folder))
    assert stated["num_attention_heads"] == 4
    assert not {"shape", "other"} & set(stated)


def test_common_state_is_read_from_checkpoints_of_later_versions(tmp_path):
    """megatron-core 0.19 stores it as an object next to the tensors, and no longer as `common.pt`."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save

    from recycle.megatron.arguments import common_state, stated_arguments

    name = ShardedObject("common_state", None, (1,), (0,)).unique_key
    state = {"weight": torch.ones(3), name: [{"iteration": 3, "args": Namespace(rotary_base=7, other=_Runs())}]}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(state, storage_writer=FileSystemWriter(tmp_path), planner=planner, no_dist=True)
    common = common_state(tmp_path)
    assert common["iteration"] == 3
    assert stated_arguments(common) == {"rotary_base": 7}


@pytest.mark.process
def test_import_prints_only_its_own_lines(imported):
    line = f"-m recycle import-megatron {imported.write()} --job job.toml -o target"
    output = subprocess.run([sys.executable, *line.split()], capture_output=True, check=True, text=True)
    # torch's CUDA build itself logs that there is a CUDA compiler and no GPU.
    assert [text for text in output.stderr.splitlines() if "No CUDA runtime" not in text] == []
    assert len(output.stdout.splitlines()) == 3


@pytest.mark.parametrize("tensor", ["decoder.layers.self_attention.linear_qkv.bias", "output_layer.bias"])
def test_unexpected_tensor_is_refused(imported, tensor):
    from torch.distributed.checkpoint import FileSystemWriter, save

    inside = Path("iter_0000003")
    state = {name: torch.zeros(2) for name in (tensor, "embedding.word_embeddings.weight")}
    save(state, storage_writer=FileSystemWriter(inside), no_dist=True)
    (inside / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert imported(inside).refused("iter_0000003: ")


def test_weights_that_are_not_finite_are_refused(imported, part):
    parameter = next(part.parameters())
    before = parameter.detach().clone()
    parameter.data[0, 0] = float("nan")
    folder = imported.write()
    parameter.data.copy_(before)
    assert imported(folder).refused("embedding.word_embeddings.weight")
    assert not TARGET.exists()


def test_message_on_a_damaged_checkpoint_names_the_file(imported):
    inside = imported.write()
    data, index, newest = inside / "__0_0.distcp", inside / ".metadata", inside.parent / NEWEST
    content = data.read_bytes()
    for damage, words in (
        (lambda: data.write_bytes(content[:1000]), ("__0_0.distcp: cut off, 1000 bytes",)),
        (lambda: data.write_bytes(content[:100] + bytes(len(content) - 100)), ("iter_0000003: cannot be read (",)),
        (data.unlink, ("__0_0.distcp: missing",)),
        (lambda: index.write_bytes(index.read_bytes()[:200]), (".metadata: ",)),
        (lambda: newest.write_text("9"), (f"{NEWEST}: ", "iter_0000009", str(inside))),
        (lambda: newest.write_text("9" * 5000), (f"{NEWEST}: ", str(inside))),
    ):
        damage()
        assert imported(inside.parent).refused(*words)


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ("mp_rank_00/model_optim_rng.pt", "--ckpt-convert-format torch_dist"),
        ("mp_rank_00_000/model_optim_rng.pt", "--ckpt-convert-format torch_dist"),
        (".metadata __0_0.distcp", "recycle import-hf"),
        ("config.json model.safetensors", "recycle import-hf"),
        ("manifest.json", "[model] weights"),
        ("iter_0000005/metadata.json", "iter_0000005"),
    ],
)
def test_other_kinds_of_checkpoints_are_recognized(imported, files, remedy):
    for name in files.split():
        path = Path("other", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert imported(Path("other")).refused("other: ", remedy)
