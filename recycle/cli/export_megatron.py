"""`recycle export-megatron`: a checkpoint to one of Megatron's."""

from __future__ import annotations

from recycle.cli.terminal import JsonOption, NewFolder, OwnCheckpoint, print_result


def export_megatron(
    checkpoint: OwnCheckpoint,
    output: NewFolder,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint of Megatron's (torch_dist): weights and, of a run's checkpoint, Adam's moments and step count.

    Megatron loads it at any tensor, pipeline and virtual pipeline size, whatever shape the run had.

    Example: **recycle export-megatron runs/mine/checkpoints/step-00000999 -o megatron**
    """

    from recycle.megatron.conversion import export_model

    found = export_model(checkpoint, output)
    weights = "parameters with their moments" if found.moments else "parameters"
    print_result(
        as_json,
        {
            "folder": str(output),
            "parameters": found.parameters,
            "iteration": found.iteration,
            "moments": found.moments,
        },
        f"{output}: {found.parameters:,} {weights} in float32, of iteration {found.iteration}",
        f"load it with Megatron-LM: --load {output} --no-load-rng{'' if found.moments else ' --no-load-optim'}",
    )
