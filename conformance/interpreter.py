"""An interpreter of schedules that shares no code with recycle: a second opinion on verdicts, makespans and periods.

`check` applies `rules`, then runs the programs instruction by instruction until the state of the pipeline repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from conformance.rules import SUMS, Finding, Key, Op, Programs

_SECONDS = {
    "F": "F", "I": "I", "W": "W", "W_PART": "W", "B": "IW", "R": "F", "REPLAY": "FIW", "OFFLOAD": ("copy",),
    "RELOAD": ("copy",), "SEND_F": ("transfer",), "SEND_B": ("transfer",), "REDUCE_GRAD": ("reduce",),
    "REDUCE_BUCKET": ("reduce",), "STEP": ("step",), "GATHER_PARAMS": ("gather",),
}  # fmt: skip


class Task(NamedTuple):
    """An instruction in one iteration: rows that it waits for, also of the iteration before, queues, and seconds.

    A task begins when it is first in all its queues: of its worker, its lane and its channels.
    """

    waits: set[Key]
    carried: set[Key]
    queues: list[Key]
    seconds: float


class Interpreter(Programs):
    """Runs iterations of the programs of one case."""

    def memory(self) -> Iterator[Finding]:
        limits, most, static = self.case["limits"], self.case["byte_limit"], self.case["times"].get("static", 0)
        for w in self.live:
            held = peak = 0.0
            at = None
            for op in self.programs[w]:
                held += op.kind in ("F", "RELOAD", "REPLAY", "R")
                if held > peak + 1e-9:
                    peak, at = held, op
                ended = op.kind in ("B", "W", "OFFLOAD", "REPLAY") or (self.case["forward_only"] and op.kind == "F")
                held -= ended + (op.kind == "W_PART") / self.buckets
                held -= op.kind in ("B", "I") and len(self.at["R", op.stage + 1, op.micro_batch, w])
            own = static * len(self.placement[w])
            if limits and peak > limits[int(w.split(".")[1])] and at:
                yield ("activation-limit", *at.place)
            if most is not None and own + peak > most:
                yield ("byte-limit", *at.place) if own <= most and at else ("byte-limit", w, None, None)

    def seconds(self, op: Op) -> float:
        times, names, stage = self.case["times"], _SECONDS.get(op.kind, ""), op.stage - (op.kind == "SEND_B")
        share = 1 / self.buckets if op.kind in ("W_PART", *SUMS) else 1.0
        if op.text[0] == "(" and "pair" in times:  # each half takes half the time of the pair
            names, stage, share = ("pair",), int(op.text[1 : op.text.index("F")]), 0.5
        if op.micro_batch and not op.peer and "OAD" not in op.kind:
            share *= times.get("speed", {}).get(op.worker, 1)
        total = 0.0
        for price in (times.get(name, 0) for name in names):
            price = price.get(f"{op.worker}>{op.peer}", 0) if isinstance(price, dict) else price
            total += price[stage] if isinstance(price, list) else price
        return total * share

    def channels(self, op: Op) -> list[int]:
        """The channels of a transfer whose ends carry one transfer at a time: none or one."""
        channels, lane = self.case["channels"], [op.worker, op.peer][:: 1 if op.kind.startswith("SEND") else -1]
        return [0] if channels == "all" else [n for n, lanes in enumerate(channels or ()) if lane in lanes]

    def plan(self) -> None:
        """Fill `tasks` and `queues`, which hold the rows of the tasks in their order."""
        self.tasks: dict[Key, Task] = {}
        self.queues: dict[Key, list[Key]] = defaultdict(list)
        self.of_kind: dict[str, list[Op]] = defaultdict(list)
        for op in self.ops:
            self.of_kind[op.kind].append(op)
        self.gradients = [op for op in self.ops if self.adds(op, op)]
        sends = {(*op.value, op.worker, op.peer): op.row for op in self.of_kind["SEND_F"] + self.of_kind["SEND_B"]}
        for w in self.live:
            # The rows before: on the worker, on its way to the host, and of its sums.
            last, offload, total = Key(), Key(), Key()
            for op in self.programs[w]:
                task = self.task(op)
                queues: list[Key] = [("worker", w)]
                shared = [("channel", w, channel) for channel in self.channels(op)]
                if op.kind.startswith("RECV"):
                    row, queues = sends[(*op.value, op.peer, w)], []
                    task.waits.add(row)
                    for channel in shared:
                        self.queues[channel].append(row)
                elif op.kind.startswith("SEND"):
                    queues = [("lane", w, op.peer), *shared]
                    task.queues.extend(("channel", op.peer, channel) for channel in self.channels(op))
                elif op.kind in ("OFFLOAD", "RELOAD"):
                    queues = [(op.kind, w)]
                    task.waits.update({last, offload} - {()} if op.kind == "RELOAD" else ())
                elif op.kind in SUMS:
                    self.tasks[*op.row, "arrives"] = Task(set(), set(), list(queues), 0.0)
                    self.tasks[*op.row, "joins"] = Task({(*op.row, "arrives"), total} - {()}, set(), [], 0.0)
                    self.queues[queues[0]].append((*op.row, "arrives"))
                    queues = [("sum", w)] + queues * (op.kind == "REDUCE_GRAD")
                    total = op.row
                if ("worker", w) in queues:
                    task.waits.update({offload} - {()})
                    last, offload = op.row, Key()
                offload = op.row if op.kind == "OFFLOAD" else offload
                task.queues.extend(queues)
                if half := self.tasks.get(op.row):  # of a pair
                    waits, carried = task.waits | half.waits, task.carried | half.carried
                    task = Task(waits, carried, half.queues, task.seconds + half.seconds)
                else:
                    for queue in queues:
                        self.queues[queue].append(op.row)
                self.tasks[op.row] = task

    def task(self, op: Op) -> Task:
        """What an instruction waits for because of its kind."""
        waits, carried = set[Key](other.row for other in self.needs(op)), set[Key]()
        steps, reduces = ({other.row for other in self.of_kind[kind]} for kind in ("STEP", "REDUCE_GRAD"))
        is_barrier = self.case["optimizer"] == "barrier"
        if op.kind in SUMS:
            waits |= {(*other.row, "joins") for other in self.of_kind[op.kind] if other[3:] == op[3:]}
            waits |= {other.row for other in self.gradients if other.stage == op.stage and self.adds(other, op)}
        elif op.kind == "STEP":
            waits, carried = (waits | reduces, carried) if is_barrier else (waits, reduces)
        elif op.kind == "GATHER_PARAMS":
            waits |= {other.row for other in self.of_kind["STEP"] if other.stage == op.stage}
        elif op.kind in ("F", "R", "REPLAY"):
            updates = (self.at[kind, op.stage, None, op.worker] for kind in ("STEP", "GATHER_PARAMS"))
            own = {update.row for each in updates for update in each}
            carried = own | steps if is_barrier else own
        return Task(waits, carried, [], self.seconds(op))

    def order(self) -> tuple[list[Key], Finding | None]:
        """An order in which all tasks run, or the first instruction of a cycle of waits."""
        self.plan()
        before = {row: set(task.waits) for row, task in self.tasks.items()}
        for queue in self.queues.values():
            for first, second in pairwise(queue):
                before[second].add(first)
        done: dict[Key, None] = {}
        stuck = list(self.tasks)
        while ready := [row for row in stuck if before[row] <= done.keys()]:
            done |= dict.fromkeys(ready)
            stuck = [row for row in stuck if row not in done]
        for start in sorted(row for row in stuck if len(row) == 2):
            reached = seen = before[start] - done.keys()
            while reached and start not in seen:
                reached = {row for each in reached for row in before[each]} - done.keys() - seen
                seen = seen | reached
            if start in seen:
                op = next(op for op in self.ops if op.row == start)
                channels = self.case["channels"]
                code = "serialised-transport" if channels == "all" else "shared-communicators"
                return [], (code if channels else "deadlock", *op.place)
        return list(done), None

    def check(self) -> dict[str, Any]:
        """{"findings": ...} of a broken schedule, {"makespan": ..., "period": ...} of a valid one."""
        found = self.findings() or list(self.memory())
        channels, order = self.case["channels"], list[Key]()
        for self.case["channels"] in [None, channels] if channels else [None]:
            if not found:
                order, deadlock = self.order()
                found = [deadlock] if deadlock else []
        if found or self.case["implied"]:
            return {"findings": [list(finding) for finding in found]}
        free: dict[Key, float] = defaultdict(float)
        ends: dict[Key, float] = {}
        tops, states = list[float](), list[tuple[float, ...]]()
        while len(tops) < 96:
            before, ends = ends, {}
            for row in order:
                waits, carried, queues, seconds = self.tasks[row]
                needed = [ends[each] for each in waits] + [before.get(each, 0.0) for each in carried]
                ends[row] = max(0.0, *needed, *(free[each] for each in queues)) + seconds
                free.update(dict.fromkeys(queues, ends[row]))
            tops.append(max(ends.values()))
            states.append(tuple(round(tops[-1] - each, 9) for each in (*free.values(), *ends.values())))
            if states[-1] in states[:-1]:
                break
        first = states.index(states[-1]) if len(tops) < 96 else 47
        return {"makespan": tops[0], "period": (tops[-1] - tops[first]) / (len(tops) - 1 - first)}


def check(case: dict[str, Any]) -> dict[str, Any]:
    """The verdict on a case, with all keys of `run.DEFAULTS`."""
    return Interpreter(dict(case)).check()
