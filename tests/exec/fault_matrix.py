"""Every kind of fault in every phase, and several at once: what is struck, what came of it, and
docs/reference/faults.md of it.

A run strikes one kind in one phase after the other, always the same worker, which re-joins in between; steps are
staggered when it is struck. `python -m tests.exec.fault_matrix` (`make faults`) rewrites the page's tables.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.faults.kinds import KINDS, PHASES, FaultKind
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.processes.forkserver import ForkServer
from tests import DOCS
from tests.exec.runs import assert_same_training, job, of_kind

PAGE = DOCS / "reference" / "faults.md"
JOB = job(
    3,
    2,
    2,
    train={"clip": 1e9},
    eval={"every": 4, "batches": 2},
    membership={"heartbeat": 0.1, "dead_after": 1.5, "hung_after": 1.5, "warm_up": 10.0},
)
ENDING = [name for name, kind in KINDS.items() if kind.ends and not kind.announced]
COLUMNS = ("middle", *(phase for phase in PHASES if phase != "gather"))
SHARDED_COLUMNS = ("middle", *PHASES)
STRUCK, APART = "0.1", 4
"""The worker, and the steps from one strike to the next: struck, away, back with the barrier, staggered again; in the
evaluation that follows the second of them: an evaluation, struck, away, back with the barrier."""
AHEAD = 3
"""Steps from a death to a strike that it prepares: others have copied the shards of the dead worker by then."""
REPEATED = ("undo", "acknowledge", "form")
"""Phases of a generation that repeats the iteration: a spoiled gradient of a peer is the reason."""
LOAD_SECONDS = 10.0
"""How much longer than said a detection may take on a machine with too much to do."""

Launch = Callable[[Sequence[str]], RunResult]
"""Trains JOB for STEPS iterations with these faults."""


@dataclass(frozen=True)
class Scenario:
    """Faults of one scenario, at steps relative to it; all workers are back in the end.

    Attributes:
        what: in words.
        faults: `{}` stands for the step of the scenario, `{0}` also, `{1}` for the one before.
        dead: workers that are dead before; the scenario has their `rejoin`.
    """

    what: str
    faults: tuple[str, ...]
    dead: tuple[str, ...] = ()


SCENARIOS = (
    Scenario("two at once, of two stages", ("kill:0.0@{}", "kill:1.1@{}")),
    Scenario("two at once, of one stage", ("segfault:1.1@{}", "kill:2.1@{}.reduce")),
    Scenario("one killed, one stopped", ("kill:1.1@{}", "stop:2.0@{}")),
    Scenario("one killed during the recovery from another", ("kill:1.1@{}", "kill:0.0@{}.form")),
    Scenario("one hangs during the recovery from another", ("exception:1.1@{}", "hang:0.0@{}.acknowledge")),
    Scenario("one killed while another re-joins", ("rejoin:1.1@{}", "kill:0.0@{}.form"), ("1.1",)),
    Scenario("the re-joiner dies while it copies its state", ("rejoin:1.1@{}", "kill:1.1@{}.copy"), ("1.1",)),
    Scenario("the source of its state dies", ("rejoin:1.1@{}", "oom:0.1@{}.copy"), ("1.1",)),
    Scenario("the source of its state stops", ("rejoin:1.1@{}", "stop:0.1@{}.copy"), ("1.1",)),
    Scenario("re-joiner and source are cut from each other", ("rejoin:1.1@{}", "cut=0.1:1.1@{}.copy"), ("1.1",)),
)
SCENARIO_STEPS = 6


STEPS = 4 + SCENARIO_STEPS * len(SCENARIOS)
"""Iterations of every run, so that they share one without faults."""


def phases(kind: FaultKind, columns: Sequence[str] = COLUMNS) -> list[str]:
    """The columns in which it strikes."""
    return ["middle", *(phase for phase in columns if phase in kind.phases)]


def matrix_faults(name: str, struck: Sequence[str]) -> tuple[list[str], list[str]]:
    """(faults, the fault of each phase) of the run that strikes one kind in these phases."""
    faults = []
    strikes = []
    step = 2
    for phase in struck:
        if phase == "copy":
            step += AHEAD - 1
        at = step + (phase == "evaluation")
        given = {"copy": "=1.1"}.get(phase, "=0.0") if KINDS[name].pair else ""
        strike = f"{name}{given}:{STRUCK}@{at}" + ("" if phase == "middle" else f".{phase}")
        gone = STRUCK
        if phase in REPEATED:
            faults.append(f"nan:1.1@{step}")
        if phase == "copy":
            faults += [f"kill:1.1@{step - AHEAD}", f"rejoin:1.1@{step}"]
            gone = "1.1" if KINDS[name].pair else STRUCK
        strikes.append(strike)
        faults += [strike, f"rejoin:{gone}@{at + 2}"]
        step += APART * (1 + (phase == "evaluation"))  # so that no other worker is struck before a cut is found
    assert step < STEPS
    return faults, strikes


def scenario_faults() -> tuple[list[str], list[list[str]]]:
    """(faults, the faults of each scenario) of the run that goes through these scenarios."""
    faults = []
    strikes = []
    for place, scenario in enumerate(SCENARIOS):
        step = 4 + SCENARIO_STEPS * place
        own = [text.format(step) for text in scenario.faults]
        strikes.append(own)
        faults += [f"kill:{worker}@{step - AHEAD}" for worker in scenario.dead] + own
        ended = {str(fault.worker) for fault in map(parse_fault, own) if KINDS[fault.kind].ends}
        faults += [f"rejoin:{worker}@{step + 2}" for worker in sorted(ended)]
    return faults, strikes


def detections(run: RunResult, fault: str) -> tuple[float, str, str] | None:
    """(seconds from the fault to its detection, dead worker, cause); None if it was not detected."""
    parsed = parse_fault(fault)
    pair = {str(parsed.worker), str(parsed.other)}
    struck = None
    for event in run.events:
        if event.get("fault") == fault:
            struck = float(event["time"])
        elif struck is not None and event["kind"] == "detected" and event["worker"] in pair:
            return float(event["time"]) - struck, event["worker"], event["cause"]
    return None


def limit(name: str) -> float:
    """Seconds that the detection of a kind takes at most, for JOB."""
    limits = JOB.membership
    frozen = {
        "stop": limits.dead_after + limits.heartbeat,
        "hang": limits.dead_after + limits.heartbeat,
        "stall": limits.hung_after + 2 * limits.heartbeat,
        "cut": limits.dead_after + 1.0 + limits.heartbeat,
    }
    return frozen.get(name, 0.2)


def causes(name: str) -> str:
    """What the cause of a detection says, as a regular expression."""
    messages = {
        "kill": "killed by SIGKILL",
        "segfault": "killed by SIGSEGV",
        "exception": r"ended with exit code 1 \(RuntimeError: .*\)",
        "oom": r"ended with exit code 1 \(MemoryError.*\)",
        "stop": "no heartbeat for 1.5 s",
        "hang": "no heartbeat for 1.5 s",
        "stall": r"no progress for [0-9.]+ s in \S+",
        "cut": r"cut off from worker \S+",
    }
    return messages[name]


def steps_for(struck: Sequence[str]) -> int:
    """Iterations of a run that strikes in these phases, all of whose workers are back in the end."""
    return APART * (len(struck) + 3)


def matrix_row(name: str, struck: Sequence[str], launch: Launch, reference: RunResult) -> list[str]:
    """Strikes one kind in these phases; its row of the page. Fails where something else came of it.

    Args:
        reference: the run without faults.
    """
    faults, strikes = matrix_faults(name, struck)
    run = launch(faults)
    assert_same_training(run, reference)
    cells = dict.fromkeys(COLUMNS, "–")
    for phase, strike in zip(struck, strikes, strict=True):
        result = detections(run, strike)
        assert result is not None, f"{strike} was not detected"
        seconds, _, cause = result
        assert re.fullmatch(causes(name), cause), f"{strike}: {cause}"
        assert seconds <= limit(name) + LOAD_SECONDS, f"{strike}: {seconds} s"
        cells[phase] = f"{max(seconds, 0.0):.2f}"
    deaths = of_kind(run, "detected")
    killed = sum(fault.startswith("kill:1.1@") for fault in faults)
    assert len(deaths) == len(strikes) + killed, f"{name}: {[(d['worker'], d['cause']) for d in deaths]}"
    return [f"`{name}`", *cells.values(), "identical"]


def scenario_rows(launch: Launch, reference: RunResult) -> Iterator[list[str]]:
    """Goes through these scenarios; their rows of the page."""
    faults, strikes = scenario_faults()
    run = launch(faults)
    assert_same_training(run, reference)
    for scenario, own in zip(SCENARIOS, strikes, strict=True):
        result = [(fault, detections(run, fault)) for fault in own if not fault.startswith("rejoin")]
        for fault, seen in result:
            assert seen is not None, f"{fault} was not detected"
            assert re.fullmatch(causes(fault.partition(":")[0].partition("=")[0]), seen[2]), f"{fault}: {seen[2]}"
        relative = " ".join(f"`{text.format('n')}`" for text in scenario.faults)
        by = "; ".join(f"{seen[1]} {seen[2]}" for _, seen in result if seen is not None)
        longest = max(seen[0] for _, seen in result if seen is not None)
        yield [scenario.what, relative, re.sub(r" in [^ ;]+| \(.*?\)", "", by), f"{longest:.2f}", "identical"]


MATRIX_HEAD = ["kind", *COLUMNS, "losses"]
SCENARIO_HEAD = ["what", "faults", "detected", "seconds", "losses"]


def table(head: list[str], rows: Sequence[list[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(cells) + " |\n" for cells in (head, *rows)]
    return lines[0] + "|" + "---|" * len(head) + "\n" + "".join(lines[1:])


def main():
    """Replace both tables of the page."""
    server = ForkServer("emulated")
    os.environ["RECYCLE_CACHE"] = tempfile.mkdtemp(prefix="recycle-cache-")

    def launch(faults):
        folder = tempfile.mkdtemp(prefix="recycle-faults-")
        struck = [parse_fault(fault) for fault in faults]
        return train(JOB, folder, steps=STEPS, faults=struck, planner=plan_for_training, server=server)

    try:
        reference = launch([])
        rows = [matrix_row(name, phases(KINDS[name]), launch, reference) for name in ENDING]
        tables = [table(MATRIX_HEAD, rows), table(SCENARIO_HEAD, list(scenario_rows(launch, reference)))]
    finally:
        server.close()
    page = PAGE.read_text()
    for head, text in zip((MATRIX_HEAD, SCENARIO_HEAD), tables, strict=True):
        start = re.escape("| " + " | ".join(head) + " |\n")
        page, count = re.subn(f"{start}(?:\\|.*\n)*", lambda _, text=text: text, page)
        assert count == 1, f"{PAGE}: the table of {head[0]} is not there"
    PAGE.write_text(page)


if __name__ == "__main__":
    sys.exit(main())
