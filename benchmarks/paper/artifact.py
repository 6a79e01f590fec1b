"""The bookkeeping of Oobleck's published artifact, restated, on its own throughput tables and traces.

    python benchmarks/paper/artifact.py [--traces DIR]

For each system a table says how many samples per second so many nodes train; a trace says which nodes are there; the
rules below say which steps count. This reproduces the published averages, so it tests the bookkeeping and says nothing
about pipelines: the throughputs are inputs. The rules were read from the simulators of SymbioticLab/Oobleck (branch
sosp23-artifact, commit 7966556, tools/simulator, MIT), whose cells and tables these are; no code of theirs is here.

What all three share: a node is usable 45 s after it came. A pause ends with all usable nodes that are on the list of
those who meet; the step time is read from the table then and only then, for 15 to 30 nodes. At one stamp come adds,
removals, usable nodes, ends of pauses, ends of steps. Nothing counts from the last row's stamp on. The throughput is
that of the steps that count, from the first start to the last end of a step.

Flaw 1, which `flaws` switches on with what else a class names: k removals at one stamp begin k pauses, the first to end
takes the list, and the next finds it empty and stops training until another node comes or goes.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import os
from dataclasses import dataclass, field
from pathlib import Path

TRACES = ("6h", "3h", "1h", "30m", "10m", "scale_gcp-trace", "scale_p3-trace")
LEAST, MOST, USABLE = 15, 30, 45_000
"""Nodes at which the tables end, and milliseconds until a node that came is usable."""
STAGES = 12
"""Nodes without which the artifact does not train, and the depth of Bamboo's pipelines in its bookkeeping."""
ADD, REMOVE, READY, PAUSE_END, STEP_END, CHECKPOINT_END = range(6)


@dataclass(frozen=True)
class Case:
    """A model under a system.

    Attributes:
        batch: samples per step.
        table: samples per second at 30, 29, ... 15 nodes.
        pause: milliseconds after a removal (Bamboo: to balance again).
        published: average samples per second on each of `TRACES`.
        checkpoint: milliseconds that one takes (Varuna).
        restarts: milliseconds in place of `pause`, by the nodes that met last: 30, 29, ... 15.
        steps: that count, where they are published.
    """

    batch: int
    table: tuple[float, ...]
    pause: int
    published: tuple[float, ...]
    checkpoint: int = 0
    restarts: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split())


_BAMBOO_BERT = (119.2546584, *[99.37888199] * 6, *[74.53416149] * 6, *[49.68944099] * 3)
_BAMBOO_GPT2 = (27.02956359, *[22.52463632] * 6, *[16.89347724] * 6, *[11.26231816] * 3)
CASES = {
    ("oobleck", "BERT-large"): Case(
        8192,
        _numbers(
            "368.246 362.215 328.354 327.778 329.139 307.213 304.454 278.526 285.844 260.314 261.679 243.557 228.055"
            " 209.208 214.805 192.305"
        ),
        2_000,
        _numbers("287.10 286.91 286.28 285.15 282.11 243.68 221.40"),
        steps=(11353, 5672, 1885, 938, 308, 1137, 1101),
    ),
    ("oobleck", "GPT-2"): Case(
        1024,
        _numbers(
            "110.006 109.670 98.837 100.075 99.480 91.018 90.522 83.404 83.331 76.950 76.715 71.587 66.750 63.016"
            " 62.748 55.916"
        ),
        2_000,
        _numbers("85.59 85.56 85.42 85.23 84.81 73.06 66.83"),
        steps=(27076, 13531, 4500, 2243, 742, 2727, 2659),
    ),
    ("varuna", "BERT-large"): Case(
        8192,
        _numbers(
            "343.1328746 331.6951121 329.5800552 326.5438348 306.0386227 298.3794267 290.038974 280.0744467"
            " 267.8972968 255.720147 243.5429971 232.9541711 222.3653452 211.7765192 202.5688445 193.3611697"
        ),
        76_000,
        _numbers("260.11 256.47 246.03 232.85 173.52 163.57 126.53"),
        checkpoint=15_800,
        restarts=_numbers(
            "71300 67600 67600 49100 112000 108300 104600 100900 97200 93500 89800 86100 82400 78700 75000 71300"
        ),
    ),
    ("varuna", "GPT-2"): Case(
        1024,
        _numbers(
            "125.7855818 117.6280102 117.6280102 106.8250673 110.9162094 102.0772415 102.0772415 96.65353837"
            " 96.65353837 85.83389481 88.31094283 78.31133417 78.31133417 70.46360441 70.46360441 64.29935764"
        ),
        83_000,
        _numbers("86.51 86.15 85.17 83.43 76.39 65.46 51.43"),
        checkpoint=11_500,
    ),
    ("bamboo", "BERT-large"): Case(8192, _BAMBOO_BERT, 76_000, _numbers("77.04 77.01 75.60 75.46 69.84 68.03 63.62")),
    ("bamboo", "GPT-2"): Case(1024, _BAMBOO_GPT2, 80_000, _numbers("17.47 17.46 17.13 17.16 16.01 15.44 14.30")),
}


@dataclass(order=True, slots=True)
class Event:
    """Events of one stamp and kind come in the order that the heap happens to have, here as there: places in a pipeline
    and checkpoints depend on it."""

    time: int
    kind: int
    what: str = field(compare=False, default="")


@dataclass(frozen=True)
class Result:
    """What a replay came to.

    Attributes:
        steps: that count.
        throughput: samples per second.
        halted: seconds in which training stood still although there were nodes enough.
    """

    steps: int
    throughput: float
    halted: float


@dataclass
class Replay:
    """The rule that Oobleck's model follows as it is; the other two change what a removal and a step do.

    A step that ends in the pause after a removal still counts; what is in progress when the pause ends is lost.
    """

    case: Case
    flaws: bool = True
    nodes: dict[str, bool] = field(default_factory=dict)  # name -> usable
    meeting: list[str] = field(default_factory=lambda: [])
    pauses: int = 0  # that have not ended
    trains: bool = False
    begun: int | None = None
    last: int = 0
    ended: int = 0  # steps
    met: int = MOST  # usable nodes at the last meeting, as the tables have them
    step: int = 0  # milliseconds
    generation: int = 0
    halted: int = 0
    halt: int | None = None
    events: list[Event] = field(default_factory=lambda: [])

    def run(self, trace: Path) -> Result:
        """Replay an event CSV."""
        with open(trace, newline="") as rows:
            listed = [(int(time), ADD if what == "add" else REMOVE, node) for time, what, node in csv.reader(rows)]
        for time, kind, node in listed:
            self.at(time, kind, node)
        final = listed[-1][0]
        handlers = {
            ADD: self.added,
            REMOVE: self.removed,
            READY: self.ready,
            PAUSE_END: self.pause_ended,
            STEP_END: self.step_ended,
            CHECKPOINT_END: lambda time, what: None,
        }
        while self.events and self.events[0].time < final:
            event = heapq.heappop(self.events)
            handlers[event.kind](event.time, event.what)
        seconds = (self.last - (self.begun or 0)) / 1000
        return Result(self.steps(), self.steps() * self.case.batch / seconds, self.halted / 1000)

    def steps(self) -> int:
        """Steps that count."""
        return self.ended

    def at(self, time: int, kind: int, what: str = "") -> None:
        heapq.heappush(self.events, Event(time, kind, what))

    def usable(self) -> list[str]:
        return [node for node, is_usable in self.nodes.items() if is_usable]

    def added(self, time: int, node: str) -> None:
        self.nodes[node] = False
        self.at(time + USABLE, READY, node)

    def removed(self, time: int, node: str) -> None:
        del self.nodes[node]
        if self.begun is not None or self.pauses:
            self.pause(time, self.case.pause)

    def ready(self, time: int, node: str) -> None:
        if node in self.nodes:
            self.nodes[node] = True
            if not self.trains and not self.pauses and len(self.usable()) >= STAGES:
                self.pause(time, self.case.pause)

    def pause(self, time: int, length: int) -> None:
        self.meeting = self.usable()
        self.pauses += 1
        self.at(time + length, PAUSE_END)

    def pause_ended(self, time: int, _: str) -> None:
        self.pauses -= 1
        if self.pauses and not self.flaws:
            return
        self.generation += 1
        met, self.meeting = self.meeting, []
        if len(met) < STAGES:
            self.trains = False
            self.halt = time if self.halt is None else self.halt
            return
        if self.halt is not None:
            self.halted, self.halt = self.halted + time - self.halt, None
        self.trains = True
        self.begun = time if self.begun is None else self.begun
        self.resumed(met)
        self.next_step(time)

    def resumed(self, met: list[str]) -> None:
        self.met = min(max(len(self.usable()), LEAST), MOST)
        self.step = int(self.case.batch / self.case.table[MOST - self.met] * 1000)

    def next_step(self, time: int) -> None:
        self.at(time + self.step, STEP_END, str(self.generation))

    def step_ended(self, time: int, generation: str) -> None:
        if generation == str(self.generation):
            self.ended += 1
            self.last = time
            self.after_step(time)

    def after_step(self, time: int) -> None:
        if not self.pauses:
            self.next_step(time)


@dataclass
class Varuna(Replay):
    """A checkpoint after every tenth step and after the first step that follows a removal; a removal takes all steps
    since the last one that was finished, and pauses for the restart without the time of a checkpoint.

    Flaws besides the halting: steps go on in a pause; a checkpoint is held to fail, and takes ten steps with it, when
    in the array behind the event queue, which is not in order of time, some removal lies before its end.
    """

    all_steps: int = 0
    struck: bool = False
    safe: int = 0  # steps up to the last checkpoint

    def __post_init__(self) -> None:
        self.counts: list[bool] = []
        self.restart = self.case.pause

    def resumed(self, met: list[str]) -> None:
        super().resumed(met)
        if self.case.restarts:
            self.restart = int(self.case.restarts[MOST - self.met])

    def removed(self, time: int, node: str) -> None:
        del self.nodes[node]
        self.struck = True
        self.void(self.safe)
        if self.begun is not None or self.pauses:
            self.pause(time, self.restart - self.case.checkpoint)

    def ready(self, time: int, node: str) -> None:
        if node in self.nodes:
            self.nodes[node] = True
            if self.pauses:
                self.meeting.append(node)
            elif not self.trains:
                self.pause(time, self.restart - self.case.checkpoint)

    def void(self, first: int) -> None:
        self.counts[first:] = [False] * len(self.counts[first:])

    def after_step(self, time: int) -> None:
        self.counts.append(True)
        self.all_steps += 1
        if self.all_steps % 10 == 0 or self.struck:
            self.struck = False
            time += self.case.checkpoint
            if self.fails(time + self.case.checkpoint):
                self.all_steps = max(0, self.all_steps - 10)
                self.void(max(0, len(self.counts) - 10))
            else:
                self.safe = len(self.counts)
        if self.flaws or not self.pauses:
            self.next_step(time)

    def fails(self, end: int) -> bool:
        if not self.flaws:
            return any(event.kind == REMOVE and event.time < end for event in self.events)
        self.at(end, CHECKPOINT_END)
        kinds = [event.kind for event in self.events]
        return REMOVE in kinds[: kinds.index(CHECKPOINT_END)]

    def steps(self) -> int:
        return sum(self.counts)


@dataclass
class Bamboo(Replay):
    """Pipelines of `stages` nodes in a row; each node's predecessor takes over for it, once, and every step is then 1.5
    times as long until nodes meet again. A node without such a predecessor sends all to a restart of 30 s."""

    stages: int = STAGES
    hosts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # node -> places
    struck: int | None = None  # when the first node since the last meeting went
    stretched: bool = False
    waiting: int = 0
    pipelines: int = 0
    length: int = 0  # of the last pause

    def removed(self, time: int, node: str) -> None:
        del self.nodes[node]
        places = self.hosts.pop(node, [])
        if len(places) > 1:
            return self.pause(time, 30_000)
        if places:
            pipeline, stage = places[0]
            before = (pipeline, (stage - 1) % self.stages)
            heir = next((n for n, held in self.hosts.items() if before in held), None)
            if heir is not None and len(self.hosts[heir]) > 1:
                return self.pause(time, 30_000)
            if heir is not None:
                self.hosts[heir].append(places[0])
        if self.trains and not self.pauses and self.struck is None:
            self.struck, self.stretched = time, False
            self.step = int(self.step * 1.5)

    def ready(self, time: int, node: str) -> None:
        if node in self.nodes:
            self.nodes[node] = True
            if self.pauses:
                self.meeting.append(node)
            elif self.trains:
                self.waiting += 1
            else:
                self.pause(time, 30_000)

    def pause_ended(self, time: int, what: str) -> None:
        if any(node not in self.nodes for node in self.meeting):
            self.meeting = self.usable()
            self.at(time + self.length, PAUSE_END)
        else:
            super().pause_ended(time, what)

    def pause(self, time: int, length: int) -> None:
        self.length = length
        super().pause(time, length)

    def resumed(self, met: list[str]) -> None:
        super().resumed(met)
        self.pipelines = len(met) // self.stages
        places = [(pipeline, stage) for pipeline in range(self.pipelines) for stage in range(self.stages)]
        self.hosts = {node: [place] for node, place in zip(met, places, strict=False)}
        self.waiting = len(met) - len(places)
        self.struck = None

    def step_ended(self, time: int, generation: str) -> None:
        if generation != str(self.generation):
            return
        if self.struck is not None and not self.stretched:
            self.stretched = True
            self.at(time + int((time - self.struck) * 0.5), STEP_END, generation)
            return
        super().step_ended(time, generation)

    def after_step(self, time: int) -> None:
        overloaded = sum(len(held) > 1 for held in self.hosts.values())
        active = self.pipelines * self.stages - overloaded
        if (
            (overloaded and self.waiting >= overloaded)
            or (overloaded and 2 * overloaded / active > 0.05)
            or (active + self.waiting) // self.stages > self.pipelines
        ):
            self.pause(time, self.case.pause)
        else:
            self.next_step(time)


RULES: dict[str, type[Replay]] = {"bamboo": Bamboo, "varuna": Varuna, "oobleck": Replay}


def replay(system: str, model: str, trace: Path, flaws: bool = True) -> Result:
    """The artifact's average for a system and a model on a trace, or what it would be without its flaws: for Bamboo
    then with the six stages that its table has."""
    case = CASES[system, model]
    if system == "bamboo" and not flaws:
        return Bamboo(case, flaws, stages=6).run(trace)
    return RULES[system](case, flaws).run(trace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("RECYCLE_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces"
    parser.add_argument("--traces", type=Path, default=default, help="folder that holds oobleck/6h.csv and so on")
    folder = Path(parser.parse_args().traces) / "oobleck"
    print(f"{'system':8} {'model':10} {'trace':16} {'published':>9} {'ours':>8} {'off by':>7} {'halted s':>8} no flaws")
    for (system, model), case in CASES.items():
        for name, published in zip(TRACES, case.published, strict=True):
            path = folder / f"{name}.csv"
            ours, without = (replay(system, model, path, flaws) for flaws in (True, False))
            print(
                f"{system:8} {model:10} {name:16} {published:9.2f} {ours.throughput:8.2f}"
                f" {ours.throughput / published - 1:7.2%} {ours.halted:8.0f} {without.throughput:8.2f}"
            )


if __name__ == "__main__":
    main()
