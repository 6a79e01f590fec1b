"""`recycle export-megatron`: a checkpoint to one of Megatron's."""

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
    """Make a checkpoint of Megatron's (torch_dist): weights and, of a run's checkpoint, Adam's moments and step count.

    Megatron loads it at any tensor, pipeline and virtual pipeline size, whatever shape the run had.

    Example: **recycle export-megatron runs/mine/checkpoints/step-00000999 -o megatron**
    """

    from recycle.megatron.conversion import export_model

    found = export_model(checkpoint, output)
    if as_json:
        figures = {"parameters": found.parameters, "iteration": found.iteration, "moments": found.moments}
        print(json.dumps({"folder": str(output), **figures}))
        return
    of = "parameters with their moments" if found.moments else "parameters"
    print(f"{output}: {found.parameters:,} {of} in float32, of iteration {found.iteration}")
    print(f"load it with Megatron-LM: --load {output} --no-load-rng{'' if found.moments else ' --no-load-optim'}")
