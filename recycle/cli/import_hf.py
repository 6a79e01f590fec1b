"""`recycle import-hf`: a model of Hugging Face to a checkpoint that runs start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recycle.cli.terminal import JsonOption, NewCheckpoint, megabytes, print_result


def import_hf(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the model: config.json, safetensors, tokenizer.")
    ],
    output: NewCheckpoint,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint of a Llama, Qwen 2, Qwen 3 or Mixtral of Hugging Face.

    A job starts from it with `[model] weights = "CHECKPOINT"`. Weights are kept in fp32; bf16 and fp16 are converted
    to the same numbers. The tokenizer's files are kept beside them, and `recycle export-hf` gives all of it back.

    Example: **recycle import-hf models/Llama-3.1-8B -o llama**
    """

    from recycle.hugging_face.conversion import DTYPES, import_model

    with megabytes("written") as report:
        found = import_model(source, output, report)
    types = [DTYPES[name][0] for name in found.stored]
    converted = "" if types == ["float32"] else f", converted from {' and '.join(types)} to float32"
    figures = {"architecture": found.architecture, "parameters": found.parameters, "stored": types}
    print_result(
        as_json,
        {"checkpoint": str(output), **figures, "carried": list(found.carried)},
        f"{output}: {found.architecture}, {found.parameters:,} parameters{converted}",
        f"kept beside them: {', '.join(found.carried) or 'nothing, the folder has no tokenizer'}",
        f'start from it with [model] weights = "{output}"',
    )
