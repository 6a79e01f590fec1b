"""The main job, twice: without a failure, and through a killed worker that comes back. Compares them to the last bit.

    python examples/tiny_gpt/demo.py [--run DIR] [--steps N]

Six processes train a byte-level GPT on the source code of Python's standard library. In the second run SIGKILL hits
worker 1.1 in the middle of step 10, and a new process takes its place at step 20.
"""

from __future__ import annotations

import argparse
import shutil
from itertools import groupby
from pathlib import Path

from recycle import Job, Schedule, simulate
from recycle.cli.planner import plan_for_training
from recycle.cli.train import ProgressLines
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.processes.forkserver import ForkServer
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import with_barrier
from viz.export import export
from viz.run_files import load_run

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run",
        type=Path,
        default=Path("runs/demo"),
        help="folder for both runs, which are replaced",
    )
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    job = Job.load(HERE / "job.toml")
    faults = [f"kill:1.1@{arguments.steps // 3}", f"rejoin:1.1@{2 * arguments.steps // 3}"]
    results = []
    server = ForkServer(job.model.kind)
    try:
        for name, strikes in (("fault-free", []), ("faulty", faults)):
            shutil.rmtree(arguments.run / name, ignore_errors=True)
            print(f"\n== {name} run: {' '.join(strikes) or 'nothing happens to it'}")
            results.append(
                train(
                    job,
                    arguments.run / name,
                    steps=arguments.steps,
                    faults=[parse_fault(text) for text in strikes],
                    planner=plan_for_training,
                    observer=ProgressLines(arguments.steps, job),
                    server=server,
                )
            )
    finally:
        server.close()
    fault_free, faulty = results
    print_losses(fault_free, faulty)
    print_times(faulty)
    print_plans(job, faulty)
    page = arguments.run / "timeline.html"
    export(page, [load_run(arguments.run / "faulty")])
    print(f"\ntimeline: open {page} in a browser, or run: recycle view {arguments.run / 'faulty'}")
    if fault_free.losses != faulty.losses or fault_free.digests != faulty.digests:
        raise SystemExit("the runs differ")


def print_losses(fault_free: RunResult, faulty: RunResult) -> None:
    """Both runs' losses side by side, and whether they are the same floats."""
    print("\n== losses\n\n  step  fault-free              with failure            live")
    for one, other in zip(fault_free.metrics, faulty.metrics, strict=True):
        mark = "" if one["loss"] == other["loss"] else "  <- differs"
        print(f"  {one['step']:>4}  {one['loss']!r:<22}  {other['loss']!r:<22}  {other['live_workers']}{mark}")
    same = fault_free.losses == faulty.losses
    print(f"\n  losses identical to the last bit: {'yes' if same else 'NO'}")
    same = fault_free.digests == faulty.digests
    print(f"  final parameters and optimizer state of all workers identical to the last bit: {'yes' if same else 'NO'}")


def print_times(faulty: RunResult) -> None:
    """How long the failure and the re-join took, from the events."""
    when = {event["kind"]: event["time"] for event in faulty.events}
    commit = next(line["time"] for line in faulty.metrics if line["time"] > when["detected"])
    print("\n== time")
    print(f"  from SIGKILL to detection                {(when['detected'] - when['fault']) * 1000:6.0f} ms")
    print(f"  from SIGKILL to the new generation's run {(when['recovered'] - when['fault']) * 1000:6.0f} ms")
    print(f"  from SIGKILL to the next committed step  {(commit - when['fault']) * 1000:6.0f} ms")
    print("  Two cores run six processes here, so tokens per second say nothing about schedules; the plans below do.")


def print_plans(job: Job, faulty: RunResult) -> None:
    """Period, bound and ratios of the plans before, during and after the failure, in units of one F, I or W."""
    assert faulty.directory is not None
    used = [(plan, live) for (plan, live), _ in groupby(faulty.metrics, lambda m: (m["plan"], m["live_workers"]))]
    plain = simulate(with_barrier(one_f_one_b(job.shape)), job.profile()).period
    decoupled = Schedule.load(faulty.directory / "plans" / f"{used[0][0]}.json").metadata["period"]
    print("\n== plans (period of one iteration in units of one F, I or W; with staggered steps)")
    print("           live  period  bound  gap    ratio to plain 1F1B  ratio to the decoupled fault-free plan")
    for name, (digest, live) in zip(("before", "during", "after"), used, strict=False):
        plan = Schedule.load(faulty.directory / "plans" / f"{digest}.json").metadata
        print(
            f"  {name:<8} {live:>4}  {plan['period']:>6g}  {plan['lower_bound']:>5g}  {plan['gap']:>4.1%}"
            f"  {plan['period'] / plain:>19.2f}  {plan['period'] / decoupled:>38.2f}"
        )
    print(f"  plain fault-free 1F1B, with the barrier: {plain:g}")
    modes = ", ".join(f"{count} {mode}" for mode, count in sorted(faulty.modes.items()))
    print(f"  steps of the run with the failure: {modes}; {len(faulty.undone)} undone")


if __name__ == "__main__":
    main()
