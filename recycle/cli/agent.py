"""`recycle agent`: one per node of a cluster; starts the node's workers and may become the leader."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from recycle.cli.planner import plan_for_training
from recycle.cli.terminal import ScheduleOption
from recycle.cli.train import (
    TERMINATED,
    FaultOption,
    HelpFaultsOption,
    ProgressLines,
    PunishOption,
    end_at_termination,
    print_line,
    resolve_request,
)
from recycle.errors import JobError, errors_as
from recycle.job import Job
from recycle.job.shape import place_workers


def agent(
    job: Annotated[Path, typer.Argument(help="Job file (TOML), the same on all nodes.")],
    store: Annotated[
        str | None,
        typer.Option(
            envvar="RECYCLE_STORE",
            metavar="URL",
            help="etcd://HOST:PORT[,HOST:PORT...], or etcds:// for TLS; else [membership] store of the job.",
        ),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(
            envvar=["RECYCLE_NODE", "SLURM_NODEID", "JOB_COMPLETION_INDEX"], help="Number of this node, from 0."
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            envvar=["RECYCLE_NODES", "SLURM_NNODES"], help="Number of nodes that there are; checked against the job."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--id",
            envvar=["RECYCLE_ID", "SLURM_JOB_ID"],
            metavar="NAME",
            help="Name of the run in the store, the same on all nodes and of no other run; else the job's folder.",
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory, on a file system that all nodes share; else runs/NAME.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RECYCLE_ADDRESS",
            help="Address of this node for the other nodes' workers; else that by which it reaches the store.",
        ),
    ] = None,
    schedule: ScheduleOption = None,
    steps: Annotated[int | None, typer.Option(help="Iterations; else the job's own number.", min=1)] = None,
    fault: FaultOption = None,
    help_faults: HelpFaultsOption = False,
    punish: PunishOption = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest complete checkpoint of the run directory where the store does not have the run;"
            " the same on all nodes.",
        ),
    ] = False,
) -> None:
    """Run the agent of one node of a cluster; start one on every node, in any order.

    Agents meet in an etcd, and start and watch the workers of their nodes (docs/cluster.md). SIGTERM or SIGHUP lets the
    workers of the node leave at the end of an iteration, then the agent ends with exit code 143, after [membership]
    grace seconds at the latest; a second SIGTERM ends it at once. SIGTERM to all agents ends the run with a checkpoint;
    started again they go on, with --resume also where the store has lost its data.

    Examples:

    **recycle agent job.toml --store etcd://head:2379 --node 0** (by hand, on each node with its number)

    **srun --ntasks-per-node=1 recycle agent job.toml --store etcd://head:2379** (Slurm: number and name are found)

    **recycle agent job.toml --node 0 --fault kill:1.1@10 --fault rejoin:1.1@20** (faults: the same on all nodes)
    """
    described = Job.load(job)
    if store is not None:
        membership = msgspec.structs.replace(described.membership, store=store)
        described = msgspec.structs.replace(described, membership=membership)
        with errors_as(JobError, "--store"):
            described.validate()
    if node is None:
        raise JobError("--node: which node is this? Give its number, from 0; under Slurm it is found")
    placed = len(place_workers(described.shape, described.cluster.workers_per_node))
    if nodes is not None and nodes != placed:
        per_node = described.cluster.workers_per_node
        raise JobError(
            f"--nodes {nodes}: the job's {described.shape.worker_count} workers lie on {placed} nodes, with"
            f" [cluster] workers_per_node = {per_node} and no stage's peers all on one node"
        )
    name = name or job.resolve().parent.name
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise JobError(f"--id {name}: write letters, digits, dots, hyphens and underscores")
    own, count, faults = resolve_request(described, schedule, steps, fault, punish)

    from recycle.exec.launch.agent import Served, serve
    from recycle.exec.launch.request import request_run

    request = request_run(
        described,
        steps=count,
        schedule=own,
        planner=plan_for_training,
        faults=faults,
        observer=ProgressLines(count, described.shape),
    )
    directory = run or Path("runs") / name
    with end_at_termination(described.membership.grace) as stop:
        try:
            served = serve(request, node=node, run=name, directory=directory, address=address, resume=resume, stop=stop)
        except KeyboardInterrupt:
            print_line(f"\nnode {node}: interrupted; its workers have ended, the other nodes go on without them")
            raise typer.Exit(TERMINATED if stop.is_set() else 130) from None
    if served in (Served.LEFT, Served.STOPPED):
        print_line(f"node {node}: {served.value}; start its agent again and it takes part again")
        raise typer.Exit(TERMINATED)
    if served is Served.ENDED_BEFORE:
        ended = f"the run in {directory} has ended already, after step {count - 1}"
        print(f"node {node}: {ended}; a new one wants another --run")
        return
    print(f"node {node}: done; run directory {directory}; see it with: recycle view {directory}")
