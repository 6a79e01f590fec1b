"""`recycle train` and `recycle agent`: training straight through failures, on one machine or on a node of a cluster."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from recycle.cli.planner import plan_for_training, require_plannable
from recycle.cli.terminal import print_table, seconds_text
from recycle.errors import JobError, ScheduleError, errors_as
from recycle.exec.faults.faults import Fault, check_faults, parse_fault, parse_punishment, punish as draw_faults
from recycle.exec.faults.kinds import KINDS, PHASES
from recycle.exec.launch.trackers import Observer, sentence
from recycle.ir.formats import named_schedule
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.job.reference import explain_job
from recycle.job.shape import place_workers

if TYPE_CHECKING:
    from recycle.exec.launch.launcher import RunResult

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a run that SIGTERM or SIGHUP, also to all its workers, ended before its last iteration."""
CLOSING_SECONDS, CLOSING_SHARE = 10.0, 0.25
"""Part of the grace reserved for ending processes: at most these seconds, and this share."""
FAULT_SYNTAX = "KIND[=ARGUMENT]:WORKER[,WORKER]@STEP[-STEP][.PHASE]"


def _help_faults(is_asked: bool) -> None:
    if not is_asked:
        return
    print(f"A fault is {FAULT_SYNTAX}.")
    titles = ("example", "what happens")
    print_table(titles, ((kind.example, kind.does) for kind in KINDS.values()), left=titles)
    print(
        f"Phases: {', '.join(PHASES)}.\nSteps count from 0."
        " docs/reference/faults.md describes how each fault is detected."
    )
    raise typer.Exit


ScheduleOption = Annotated[str | None, typer.Option(help="A schedule file, or a family such as 1f1b.")]
FaultOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",  # typer 0.27 would take the metavar
        metavar="FAULT",
        help="Inject a fault, such as kill:1.1@5, rejoin:1.1@9 or slow=3:1.1@4-8; any number of times."
        " --help-faults lists all kinds.",
    ),
]
HelpFaultsOption = Annotated[
    bool, typer.Option("--help-faults", is_eager=True, callback=_help_faults, help="List the kinds of faults and stop.")
]
PunishOption = Annotated[
    str | None,
    typer.Option(
        metavar="MEAN_STEPS[,SEED]",
        help="Kill workers and let them come back at random, so many steps apart on average; a seed repeats it.",
    ),
]


def resolve_request(
    job: Job, schedule: str | None, steps: int | None, fault: list[str] | None, punish: str | None
) -> tuple[Schedule | None, int, list[Fault]]:
    """Return the run's schedule (or None), its steps, and the faults of `--fault` and `--punish`.

    Prints the faults drawn for `--punish`.

    Raises:
        JobError: a fault is invalid or can never strike, both options are given, or the job cannot be priced.
        PlanError: the job cannot be planned.
        ScheduleError: the schedule does not exist, or has another shape than the job.
    """
    own = named_schedule(schedule, job.shape) if schedule is not None else None
    if own is None:
        require_plannable(job)
    elif replace(own.shape, cut=()) != job.shape:
        raise ScheduleError(f"{schedule}: is for {own.shape}, the job for {job.shape}; plan it for this job")
    steps = job.train.steps if steps is None else steps
    absent = own.failed if own is not None else frozenset()
    faults = [parse_fault(text) for text in fault or []]
    if punish is not None:
        if faults:
            raise JobError("--punish and --fault: give one of them; what --punish draws is printed as --fault options")
        mean, seed = parse_punishment(punish)
        faults = draw_faults(job.shape, steps, mean, seed, absent)
    check_faults(faults, job, steps, absent)
    if punish is not None:
        print(f"punished with {len(faults)} faults:{''.join(f' --fault {fault}' for fault in faults)}", flush=True)
    return own, steps, faults


def train(
    job: Path,
    schedule: ScheduleOption = None,
    steps: int | None = None,
    fault: FaultOption = None,
    help_faults: HelpFaultsOption = False,
    punish: PunishOption = None,
    run: Path | None = None,
    resume: bool = False,
    explain: bool = False,
) -> None:
    """Train a job around failed workers; the losses stay equal to the run without failures.

    SIGTERM, or SIGHUP as of a closed terminal, ends the run after the current iteration, within [membership] grace
    seconds. It leaves a checkpoint to resume from (exit code 143). A second SIGTERM ends the run at once.

    Example: **recycle train examples/tiny_gpt/job.toml --fault kill:1.1@10 --fault rejoin:1.1@20**

    Example: **recycle train job.toml --schedule zb-h1 --steps 100 --run runs/mine**

    Example: **recycle train job.toml --resume --run runs/mine**

    Args:
        job: job file (TOML).
        steps: iterations; else the job's own number.
        run: new run directory; default runs/JOB-TIME, with the link runs/latest. With --resume the directory to
            continue in; default the newest.
        resume: continue from the newest complete checkpoint, in this job's shape.
        explain: check the job, print every key with its meaning and stop.
    """
    described = Job.load(job)
    own, count, faults = resolve_request(described, schedule, steps, fault, punish)

    if explain:
        from recycle.exec.launch.checks import check_libraries
        from recycle.exec.launch.request import check_settings, schedule_for

        described = price(described)
        check_settings(described, count)
        check_libraries(described)
        if own is not None:
            schedule_for(own, described)
        print(explain_job(described))
        return
    train_here(described, job, own, steps, faults, run, resume=resume)


def unused_directory(runs: Path, name: str) -> Path:
    """Return the directory of a run that starts now; waits if another one started in the same second."""
    while (directory := runs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").exists():
        time.sleep(0.1)
    return directory


def train_here(
    described: Job,
    job: Path,
    own: Schedule | None,
    steps: int | None,
    faults: list[Fault],
    run: Path | None,
    command: Sequence[str] = (),
    script_restarts: int = 0,
    resume: bool = False,
) -> None:
    """Train on this machine, and print progress and result; arguments as for `train` and `launcher.train`."""
    from recycle.exec.checkpoint.resume import newest_run
    from recycle.exec.launch import launcher

    runs, name = Path("runs"), job.resolve().parent.name
    directory = run or (newest_run(runs, name) if resume else unused_directory(runs, name))
    lines = ProgressLines(described.train.steps if steps is None else steps, described)
    again = f"recycle {'agent' if command else 'train'} {job} --resume --run {directory}"
    again += " -- COMMAND" if command else ""
    with end_at_termination(described.membership.grace) as stop:
        try:
            result = launcher.train(
                described,
                directory,
                steps=steps,
                schedule=own,
                faults=faults,
                planner=plan_for_training,
                observer=lines,
                resume=resume,
                stop=stop,
                command=command,
                script_restarts=script_restarts,
            )
            code = TERMINATED if stop.is_set() or not command else 0  # 0 if the user's script has ended the run
        except KeyboardInterrupt:
            moment = f"after step {lines.last}" if lines.last >= 0 else "before the first step"
            print_line(f"\ninterrupted {moment}; all workers have ended; run directory {directory}")
            if command or any(directory.glob("checkpoints/step-*/manifest.json")):
                print_line(f"resume from its newest checkpoint with: {again}")
            raise typer.Exit(TERMINATED if stop.is_set() else 130) from None
    if result.ended_early:
        last = result.metrics[-1]["step"] if result.metrics else -1
        print_line(f"stopped after step {last}; resume with: {again}" if last >= 0 else "stopped before the first step")
        raise typer.Exit(code)
    if result.period_error is not None:
        print(f"executed period: {result.period_error:+.1%} of the planned one (median over the steps)")
    print(f"done: {_steps(result)}; run directory {directory}; see it with: recycle view {directory}")


def agent(
    job: Path,
    store: Annotated[str | None, typer.Option(envvar="RECYCLE_STORE")] = None,
    node: Annotated[int | None, typer.Option(envvar=["RECYCLE_NODE", "SLURM_NODEID", "JOB_COMPLETION_INDEX"])] = None,
    nodes: Annotated[int | None, typer.Option(envvar=["RECYCLE_NODES", "SLURM_NNODES"])] = None,
    name: Annotated[str | None, typer.Option(envvar=["RECYCLE_ID", "SLURM_JOB_ID"])] = None,
    run: Path | None = None,
    address: Annotated[str | None, typer.Option(envvar="RECYCLE_ADDRESS")] = None,
    schedule: ScheduleOption = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    fault: FaultOption = None,
    help_faults: HelpFaultsOption = False,
    punish: PunishOption = None,
    resume: bool = False,
    restarts: Annotated[int, typer.Option(min=0)] = 0,
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND...]")] = None,
) -> None:
    """Run the agent of one node of a cluster; start one on every node, in any order.

    Agents meet in an etcd, and start and watch the workers of their nodes (docs/guides/cluster.md). After SIGTERM or
    SIGHUP the node's workers leave at the end of an iteration. The agent then ends with exit code 143, after
    [membership] grace seconds at the latest; a second SIGTERM ends it at once. SIGTERM to all agents ends the run with
    a checkpoint. Restarted agents continue it, with --resume even if the store has lost its data.

    With a command, your own Megatron script trains, started once per worker (docs/guides/own-loop.md). Without a store
    this machine then runs all workers.

    Examples:

    **recycle agent job.toml -- python pretrain.py --lr 3e-4** (your own script, on this machine)

    **recycle agent job.toml --store etcd://head:2379 --node 0** (by hand, on each node with its number)

    **srun --ntasks-per-node=1 recycle agent job.toml --store etcd://head:2379** (Slurm: number and name are found)

    **recycle agent job.toml --node 0 --fault kill:1.1@10 --fault rejoin:1.1@20** (faults: the same on all nodes)

    Args:
        job: job file (TOML), the same on all nodes.
        store (URL): where agents meet, etcd://HOST:PORT[,HOST:PORT...], or etcds:// for TLS; else [membership] store of
            the job.
        node: number of this node, from 0.
        nodes: total number of nodes; checked against the job.
        name (--id NAME): unique name of the run in the store, the same on all nodes; else the job's folder.
        run: run directory, on a file system that all nodes share; else runs/NAME.
        address: address of this node for the other nodes' workers; else the address that reaches the store.
        steps: iterations; else the job's own number.
        resume: continue from the newest checkpoint of the run directory, or of your own script, if the store does not
            have the run; the same on all nodes.
        restarts: how often your own script is started again in all processes after all hosts of a stage died; it then
            loads its newest checkpoint. Afterwards the agent ends with exit code 75; the same on all nodes.
        command: your own script, with recycle.megatron.session, and its arguments.
    """
    described = Job.load(job)
    if command and shutil.which(command[0]) is None:
        raise JobError(f"{command[0]}: cannot be run: name a program, for example python, and its arguments after --")
    if command and store is None and described.membership.store == "launcher":
        if node is not None or nodes is not None:
            raise JobError("--node and --nodes need --store: without one this machine runs all workers")
        own, count, faults = resolve_request(described, schedule, steps, fault, punish)
        train_here(described, job, own, count, faults, run, command, restarts, resume)
        return
    if restarts and not command:
        raise JobError("--restarts: is for your own script after --; for workers set [cluster] restarts")
    if store is not None:
        membership = msgspec.structs.replace(described.membership, store=store)
        described = msgspec.structs.replace(described, membership=membership)
        with errors_as(JobError, "--store"):
            described.validate()
    if node is None:
        raise JobError("--node: give the number of this node, from 0 (Slurm sets it)")
    placed = len(place_workers(described.shape, described.cluster.workers_per_node))
    if nodes is not None and nodes != placed:
        per_node = described.cluster.workers_per_node
        raise JobError(
            f"--nodes {nodes}: the job's {described.shape.worker_count} workers are placed on {placed} nodes, with"
            f" [cluster] workers_per_node = {per_node} and no stage's peers all on one node"
        )
    name = name or job.resolve().parent.name
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise JobError(f"--id {name}: write letters, digits, dots, hyphens and underscores")
    own, count, faults = resolve_request(described, schedule, steps, fault, punish)

    from recycle.exec.launch.agent import AgentExit, serve
    from recycle.exec.launch.request import request_run

    request = request_run(
        described,
        steps=count,
        schedule=own,
        planner=plan_for_training,
        faults=faults,
        observer=ProgressLines(count, described),
        command=command or (),
        script_restarts=restarts,
    )
    directory = run or Path("runs") / name
    with end_at_termination(described.membership.grace) as stop:
        try:
            served = serve(request, node=node, run=name, directory=directory, address=address, resume=resume, stop=stop)
        except KeyboardInterrupt:
            print_line(f"\nnode {node}: interrupted; its workers have ended, the other nodes continue without them")
            raise typer.Exit(TERMINATED if stop.is_set() else 130) from None
        code = TERMINATED if stop.is_set() else 0
    if served in (AgentExit.LEFT, AgentExit.STOPPED):
        print_line(f"node {node}: {served.value}")
        raise typer.Exit(code)
    if served is AgentExit.ENDED_BEFORE:
        ended = f"the run in {directory} has ended already, after step {count - 1}"
        print(f"node {node}: {ended}; give another --run for a new one")
        return
    print(f"node {node}: done; run directory {directory}; see it with: recycle view {directory}")


@contextmanager
def end_at_termination(grace: float) -> Iterator[threading.Event]:
    """Yield an event that the first SIGTERM, SIGHUP or SIGUSR1 sets; a second one interrupts like Ctrl-C.

    Further SIGHUPs are ignored: the shell and the kernel each send one when a terminal is closed. Shortly before the
    grace is over, work that has not ended is interrupted, then the process is ended; its workers die with it. An
    ignored SIGHUP, as under nohup, stays ignored.

    Args:
        grace: seconds from the first signal.
    """
    stop, has_ended = threading.Event(), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number != signal.SIGHUP:
            raise KeyboardInterrupt
        stop.set()

    def limit() -> None:
        closing = min(CLOSING_SECONDS, CLOSING_SHARE * grace)
        stop.wait()
        if not has_ended.wait(grace - closing):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            if not has_ended.wait(closing):
                os._exit(TERMINATED)

    numbers = [signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    threading.Thread(target=limit, daemon=True).start()
    try:
        yield stop
    finally:
        has_ended.set()
        stop.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _steps(result: RunResult) -> str:
    count, modes = len(result.metrics), ", ".join(f"{n} {_MODES[mode]}" for mode, n in sorted(result.modes.items()))
    return f"{count} step{'s' * (count != 1)} ({modes}; {len(result.undone)} undone)"


_MODES = {"barrier": "with the barrier", "staggered": "staggered"}


class ProgressLines(Observer):
    """Observer that prints a line per step, failure, recovery and re-join."""

    def __init__(self, steps: int, job: Job) -> None:
        self._steps, self._shape, self._unit = steps, job.shape, job.seconds_per_unit
        self.last = -1

    def waiting(self, what: str) -> None:
        print_line(f"waiting for {what}")

    def committed(self, line: dict[str, Any]) -> None:
        self.last = line["step"]
        width = len(str(self._steps))
        evaluated = f"  evaluation loss {_loss(line['eval_loss'])}" if "eval_loss" in line else ""
        period = f"{line['period']:g}" if self._unit is None else seconds_text(line["period"] * self._unit)
        print_line(
            f"step {line['step']:>{width}}/{self._steps}  loss {_loss(line['loss'])}{evaluated}"
            f"  {line['tokens_per_second']:>9,.0f} tokens/s  {line['live_workers']}/{self._shape.worker_count} workers"
            f"  plan {line['plan'][:8]}  period {period} ({line['mode']})"
        )

    def event(self, event: dict[str, Any]) -> None:
        if (text := sentence(event)) is not None:
            print_line(f"  {event['time']:8.3f} s  {text}")


def print_line(line: str) -> None:
    """Print at once; output to a full disk must not stop training.

    A closed reader or terminal ends the run like SIGHUP.
    """
    try:
        print(line, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            return
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if callable(signal.getsignal(signal.SIGHUP)):
            signal.raise_signal(signal.SIGHUP)


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.6f}"
