"""`recycle export-megatron`: a checkpoint's weights to one of Megatron's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def export_megatron(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="An imported checkpoint, or one of a run's checkpoints.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write; a new one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a checkpoint of Megatron's (torch_dist) of the weights in a checkpoint.

    Megatron loads it at any tensor, pipeline and virtual pipeline size, whatever shape the run had. The optimizer's
    moments are left out.

    Example: **recycle export-megatron runs/mine/checkpoints/step-00000999 -o megatron**
    """

    from recycle.megatron.conversion import export_model

    found = export_model(checkpoint, output)
    if as_json:
        print(json.dumps({"folder": str(output), "parameters": found.parameters, "iteration": found.iteration}))
        return
    print(f"{output}: {found.parameters:,} parameters in float32, of iteration {found.iteration}")
    print(f"load it with Megatron-LM: --load {output} --no-load-optim --no-load-rng")
