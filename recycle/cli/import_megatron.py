"""`recycle import-megatron`: the weights of one of Megatron's checkpoints to a checkpoint that runs start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recycle.cli.terminal import JsonOption, NewCheckpoint, print_result
from recycle.errors import JobError
from recycle.job import Job, is_stated


def import_megatron(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="Checkpoint of Megatron's (torch_dist): an iteration, or its parent.")
    ],
    job: Annotated[Path, typer.Option(metavar="JOB", help="Job whose [model] the weights are of.")],
    output: NewCheckpoint,
    run: Annotated[
        bool,
        typer.Option("--run", help="Import the optimizer's moments too; the folder is a run directory to resume."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint of the weights in one of Megatron's (torch_dist), of any parallel sizes.

    A job starts from it with `[model] weights = "CHECKPOINT"`. With --run the optimizer's moments and step count are
    imported too, and the job goes on from there. Megatron's index is a pickle: read only what you trust.

    The job's model is compared with the checkpoint's tensors and, where it has them, with Megatron-LM's arguments; what
    it does not state is printed as taken on trust. A job that does not state `vocabulary` keeps every row.

    Examples:

    **recycle import-megatron megatron/checkpoints --job job.toml -o weights**

    **recycle import-megatron megatron/checkpoints --job job.toml --run -o runs/mine**
    """

    from recycle.megatron.conversion import import_model, import_run

    described = Job.load(job)
    is_stated_by_job = described.model.weights is not None or is_stated(job, "model", "vocabulary")
    if run and not is_stated_by_job:
        raise JobError(
            "[model] vocabulary: state it in the job, which the run goes on with; it counts tokens, no padding"
        )
    if run:
        found = import_run(source, described, output)
    else:
        found = import_model(source, described.model, output, keeps_rows=not is_stated_by_job)
    figures = {"parameters": found.parameters, "iteration": found.iteration}
    more = {"left_out_rows": found.left_out_rows, "unstated": list(found.unstated)}
    kept = f"vocabulary: every row of the checkpoint is kept, since {job} does not state [model] vocabulary"
    padding = f"{found.left_out_rows} rows of padding after the {described.model.vocabulary} of the vocabulary"
    trusted = f"taken on trust from {job}, since the checkpoint does not state it: {', '.join(found.unstated)}"
    print_result(
        as_json,
        {"checkpoint": str(output), **figures, **more},
        f"{output}: {found.parameters:,} parameters, of iteration {found.iteration}",
        "" if is_stated_by_job else kept,
        f"left out: {padding}" if found.left_out_rows else "",
        trusted if found.unstated else "",
        f"go on from it with: recycle train {job} --resume --run {output}"
        if run
        else f'start from it with [model] weights = "{output}"',
    )
