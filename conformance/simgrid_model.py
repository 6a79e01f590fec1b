"""Makespans and periods of the cases from SimGrid, a simulator of distributed systems that shares no code with recycle.

    apt-get install python3-simgrid
    /usr/bin/python3 -m conformance.simgrid_model [FILE...]

Prints the cases that differ by over 1 %; the exit status is 1 if there are any. Each worker is an actor that computes.
Each directed pair of workers has one link, whose transfers two actors carry, one at each end. With one channel
per worker, a single actor of each worker carries all its transfers in the order of the program. A transfer is a
rendezvous of two actors in a mailbox. Reduces are barriers.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import simgrid

from conformance.run import FOLDER, Case, read_cases

ITERATIONS = 24
"""Iterations of a run; the period is the mean of the second half."""
TOLERANCE = 0.01
BANDWIDTH = 1e9
SHARES = {"F": "F", "I": "I", "W": "W", "B": "IW"}
MODELLED = re.compile(r"\(?\d+([FIWB]|SEND_[FB]|RECV_[FB]|WAIT_SEND_[FB]|REDUCE_GRAD|STEP)([\d.@;)]|$)")


class Op(NamedTuple):
    """An instruction; both halves of a pair have `pair`."""

    stage: int
    kind: str
    micro_batch: str
    peer: str
    pair: bool


class Event:
    """Wakes all waiting actors after `count` calls of `set`."""

    def __init__(self, count: int = 1) -> None:
        self._missing, self._waiting, self._semaphore = count, 0, simgrid.Semaphore(0)

    def set(self) -> None:
        self._missing -= 1
        for _ in range(0 if self._missing else self._waiting):
            self._semaphore.release()

    def wait(self) -> None:
        if self._missing > 0:
            self._waiting += 1
            self._semaphore.acquire()


def parse(text: str) -> list[Op]:
    ops = []
    for part in text.strip("()").split(";"):
        stage, kind, micro_batch, peer = re.findall(r"(\d+)([A-Z_]+)([\d.]*)@?([\d.]*)", part)[0]
        ops.append(Op(int(stage), kind, micro_batch, peer, text.startswith("(")))
    return ops


class Run:
    """Some iterations of a case, from idle."""

    def __init__(self, case: Case, iterations: int) -> None:
        self.case, self.iterations, self.times = case, iterations, case["times"]
        self.programs = {w: [parse(text) for text in program.split()] for w, program in case["programs"].items()}
        self.stages = case["shape"][1] * case["shape"][3]
        kinds = Counter(op.kind for program in self.programs.values() for ops in program for op in ops)
        hosts = Counter(op.stage for p in self.programs.values() for (op, *_) in p if op.kind == "REDUCE_GRAD")
        self.events: dict[Any, Event] = defaultdict(Event)
        for n in range(-1, iterations):
            self.events["stepped", n] = Event(kinds["STEP"] if n >= 0 else 0)
            self.events["reduced", n] = Event(kinds["REDUCE_GRAD"])
        self.has_steps = kinds["STEP"] > 0
        self.barriers = {stage: simgrid.Barrier(count) for stage, count in hosts.items()}
        self.ends = [0.0] * iterations

    def start(self, engine: simgrid.Engine) -> None:
        zone = simgrid.NetZone.create_full_zone("zone")
        hosts = {w: zone.create_host(w, 1.0) for w in self.programs}
        for w, host in hosts.items():
            for peer in hosts:
                if peer != w:
                    link = zone.create_link(f"{w}>{peer}", BANDWIDTH)
                    zone.add_route(host.netpoint, hosts[peer].netpoint, None, None, [simgrid.LinkInRoute(link)], False)
        zone.seal()
        for w, program in self.programs.items():
            simgrid.Actor.create(w, hosts[w], self.compute, w)
            queues = defaultdict(list)
            for op in (op for ops in program for op in ops if op.peer and op.kind[:4] in ("SEND", "RECV")):
                queues["all" if self.case["channels"] == "all" else (op.kind[:4], op.peer)].append(op)
            for number, queue in enumerate(queues.values()):
                simgrid.Actor.create(f"{w} {number}", hosts[w], self.carry, w, queue)

    def price(self, name: str, stage: int, pair: str = "") -> float:
        price = self.times.get(name, 0)
        price = price.get(pair, 0) if isinstance(price, dict) else price
        return float(price[stage] if isinstance(price, list) else price)

    def carry(self, w: str, queue: list[Op]) -> None:
        """Carry the transfers of a queue, in order."""
        for n in range(self.iterations):
            for op in queue:
                kind = "F" if op.kind.endswith("F") else "I"
                if op.kind.startswith("SEND"):
                    pair = f"{w}>{op.peer}"
                    self.events[kind, op.stage, op.micro_batch, w, n].wait()
                    seconds = self.price("transfer", op.stage - (kind == "I"), pair)
                    simgrid.Mailbox.by_name(pair).put(op.micro_batch, int(seconds * BANDWIDTH))
                    self.events["sent", kind, op.stage, op.micro_batch, w, n].set()
                else:
                    simgrid.Mailbox.by_name(f"{op.peer}>{w}").get()
                    self.events[kind, op.stage + (-1 if kind == "F" else 1), op.micro_batch, w, n].set()

    def compute(self, w: str) -> None:
        for n in range(self.iterations):
            if self.case["optimizer"] == "barrier" and self.has_steps:
                self.events["stepped", n - 1].wait()
            for ops in self.programs[w]:
                for op in ops:
                    self.wait_for_inputs(op, w, n)
                simgrid.this_actor.sleep_for(self.seconds(ops, w))
                for op in ops:
                    if op.kind in ("F", "I", "B"):
                        self.events["I" if op.kind == "B" else op.kind, op.stage, op.micro_batch, w, n].set()
                    elif op.kind in ("REDUCE_GRAD", "STEP"):
                        self.events["reduced" if op.kind == "REDUCE_GRAD" else "stepped", n].set()
            self.ends[n] = max(self.ends[n], simgrid.Engine.clock)

    def wait_for_inputs(self, op: Op, w: str, n: int) -> None:
        match op.kind:
            case "F" if op.stage:
                self.events["F", op.stage - 1, op.micro_batch, w, n].wait()
            case "I" | "B" if op.stage + 1 < self.stages:
                self.events["I", op.stage + 1, op.micro_batch, w, n].wait()
            case "WAIT_SEND_F" | "WAIT_SEND_B":
                kind = "F" if op.kind.endswith("F") else "I"
                self.events["sent", kind, op.stage, op.micro_batch, w, n].wait()
            case "REDUCE_GRAD":
                self.barriers[op.stage].wait()
            case "STEP" if self.case["optimizer"] == "barrier":
                self.events["reduced", n].wait()
            case "STEP":
                self.events["stepped", n - 1].wait()

    def seconds(self, ops: list[Op], w: str) -> float:
        speed = float(self.times.get("speed", {}).get(w, 1))
        if ops[0].pair and "pair" in self.times:
            return speed * self.price("pair", ops[0].stage)
        total = 0.0
        for op in ops:
            total += speed * sum(self.price(name, op.stage) for name in SHARES.get(op.kind, ""))
            total += self.price({"REDUCE_GRAD": "reduce", "STEP": "step"}.get(op.kind, ""), op.stage)
        return total


def simulate(case: Case, iterations: int) -> list[float]:
    """Seconds from the start to the end of each iteration. SimGrid has one engine per process, so a child runs it."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        settings = ["--log=root.thresh:critical", "--cfg=network/model:CM02", "--cfg=network/crosstraffic:no"]
        engine = simgrid.Engine(["conformance", *settings])
        run = Run(case, iterations)
        run.start(engine)
        engine.run()
        os.write(write, " ".join(map(repr, run.ends)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        ends = list(map(float, answer.read().split()))
    os.waitpid(child, 0)
    return ends


def is_modelled(case: Case) -> bool:
    texts = " ".join(case["programs"].values()).split()
    return isinstance(case["channels"], str | None) and all(
        MODELLED.match(part) for text in texts for part in text.strip("()").split(";")
    )


def main(arguments: list[str]) -> int:
    """Print the difference of each case; the exit status is 1 if there are larger ones than `TOLERANCE`."""
    files = [Path(argument) for argument in arguments] or sorted(FOLDER.glob("cases/*.json"))
    cases = [case for case in read_cases(files) if "period" in case["expect"]]
    modelled, worst, differ = [case for case in cases if is_modelled(case)], 0.0, 0
    for case in modelled:
        ends, expected = simulate(case, ITERATIONS), case["expect"]
        half = ITERATIONS // 2
        answers = {"makespan": simulate(case, 1)[0], "period": (ends[-1] - ends[half - 1]) / (ITERATIONS - half)}
        share = max(abs(answers[name] / expected[name] - 1) for name in answers)
        worst, differ = max(worst, share), differ + (share > TOLERANCE)
        if share > TOLERANCE:
            print(f"{case['file']}: {case['name']}: expected {expected}, SimGrid {answers}")
    print(
        f"{len(modelled)} of {len(cases)} cases compared, {differ} differ by over {TOLERANCE:.0%}, at most {worst:.2%}"
    )
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
