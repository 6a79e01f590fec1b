"""`recycle import-hf`: a model of Hugging Face to a checkpoint that runs start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from recycle.cli.terminal import TwentiethLines, progress_bars


def import_hf(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the model: config.json, safetensors, tokenizer.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="CHECKPOINT", help="Folder to write; a new one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a checkpoint of a Llama, Qwen 2, Qwen 3 or Mixtral of Hugging Face.

    A job starts from it with `[model] weights = "CHECKPOINT"`. Weights are kept in fp32; bf16 and fp16 are converted
    to the same numbers. The tokenizer's files are kept beside them, and `recycle export-hf` gives all of it back.

    Example: **recycle import-hf models/Llama-3.1-8B -o llama**
    """

    from recycle.hugging_face.conversion import DTYPES, import_model

    with progress_bars(otherwise=TwentiethLines()) as report:
        found = import_model(source, output, lambda done, whole: report("written", done // 10**6, whole // 10**6, "MB"))
    types = [DTYPES[name][0] for name in found.stored]
    if as_json:
        figures = {"architecture": found.architecture, "parameters": found.parameters, "stored": types}
        print(json.dumps({"checkpoint": str(output), **figures, "carried": list(found.carried)}))
        return
    converted = "" if types == ["float32"] else f", converted from {' and '.join(types)} to float32"
    print(f"{output}: {found.architecture}, {found.parameters:,} parameters{converted}")
    print(f"kept beside them: {', '.join(found.carried) or 'nothing, the folder has no tokenizer'}")
    print(f'start from it with [model] weights = "{output}"')
