"""`recycle export-hf`: a checkpoint to a folder that transformers loads."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from recycle.cli.terminal import JsonOption, NewFolder, OwnCheckpoint, megabytes, print_result
from recycle.job.pricing import parse_bytes


def export_hf(
    checkpoint: OwnCheckpoint,
    output: NewFolder,
    dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        typer.Option(help="Type of the weights; auto is the one that the model was imported in."),
    ] = "auto",
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of a file.")] = "2 GiB",
    as_json: JsonOption = False,
) -> None:
    """Make a folder of Hugging Face of a checkpoint of a Llama, Qwen 2, Qwen 3 or Mixtral.

    It has the weights as safetensors, `config.json`, and the tokenizer that came with the model if it was imported. The
    shape that a run had does not matter.

    Example: **recycle export-hf runs/mine/checkpoints/step-00000999 -o mine**

    Example: **recycle export-hf runs/mine/checkpoints/step-00000999 -o mine-bf16 --dtype bf16 --shard-size "5 GB"**
    """

    from recycle.hugging_face.conversion import DTYPES, export_model

    most_bytes = int(parse_bytes(shard_size, "export-hf: --shard-size"))
    with megabytes("written") as report:
        found = export_model(checkpoint, output, dtype, most_bytes, report)
    (stored,) = (DTYPES[name][0] for name in found.stored)
    rounded = "" if stored == "float32" else ", rounded from float32 (--dtype fp32 keeps every bit)"
    carried = ", ".join(found.carried) or "no tokenizer, since the weights came without one; copy yours there"
    figures = {"architecture": found.architecture, "parameters": found.parameters, "dtype": stored}
    print_result(
        as_json,
        {"folder": str(output), **figures, "carried": list(found.carried)},
        f"{output}: {found.architecture}, {found.parameters:,} parameters in {stored}{rounded}",
        f"beside them: config.json, {carried}",
        f'load it with transformers: AutoModelForCausalLM.from_pretrained("{output}")',
    )
