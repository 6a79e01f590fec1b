"""`recycle import-megatron`: the weights of one of Megatron's checkpoints to a checkpoint that runs start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from recycle.job import Job


def import_megatron(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="Checkpoint of Megatron's (torch_dist): an iteration, or its parent.")
    ],
    job: Annotated[Path, typer.Option(metavar="JOB", help="Job whose [model] the weights are of.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="CHECKPOINT", help="Folder to write; a new one.")],
    run: Annotated[
        bool,
        typer.Option("--run", help="Import the optimizer's moments too; the folder is a run directory to resume."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a checkpoint of the weights in one of Megatron's (torch_dist), of any parallel sizes.

    A job starts from it with `[model] weights = "CHECKPOINT"`. With --run the optimizer's moments and step count are
    imported too, and the job goes on from there. Megatron's index is a pickle: read only what you trust.

    Examples:

    **recycle import-megatron megatron/checkpoints --job job.toml -o weights**

    **recycle import-megatron megatron/checkpoints --job job.toml --run -o runs/mine**
    """

    from recycle.megatron.conversion import import_model, import_run

    described = Job.load(job)
    found = import_run(source, described, output) if run else import_model(source, described.model, output)
    if as_json:
        print(json.dumps({"checkpoint": str(output), "parameters": found.parameters, "iteration": found.iteration}))
        return
    print(f"{output}: {found.parameters:,} parameters, of iteration {found.iteration}")
    if run:
        print(f"go on from it with: recycle train {job} --resume --run {output}")
    else:
        print(f'start from it with [model] weights = "{output}"')
