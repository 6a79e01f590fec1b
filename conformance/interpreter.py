"""An interpreter of schedules that shares no code with recycle: a second opinion on verdicts, makespans and periods.

`check` applies `rules`, then runs the programs instruction by instruction until the state of the pipeline repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from conformance.rules import SUMS, Finding, Key, Op, Programs

_SECONDS = {
    "F": "F", "I": "I", "W": "W", "W_PART": "W", "B": "IW", "R": "F", "REPLAY": "FIW", "OFFLOAD": ("copy",),
    "RELOAD": ("copy",), "SEND_F": ("transfer",), "SEND_B": ("transfer",), "REDUCE_GRAD": ("reduce",),
    "REDUCE_BUCKET": ("reduce",), "STEP": ("step",), "GATHER_PARAMS": ("gather",),
}  # fmt: skip


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

    # One iteration as tasks: each waits for others, and for its turn in the queues of its worker, lane and channel.

    def seconds(self, op: Op) -> float:
        times, share = self.case["times"], 0.5 if op.text[0] == "(" else 1.0
        if self.case["seconds"]:
            return share * self.case["seconds"][op.worker][op.row[1]]  # type: ignore[no-any-return]
        if op.text[0] == "(" and "pair" in times:
            return share * times["pair"]  # type: ignore[no-any-return]
        parts = [times.get(name, 0) for name in _SECONDS.get(op.kind, ())]
        total = sum(part[op.stage] if isinstance(part, list) else part for part in parts)
        return total / self.buckets if op.kind in ("W_PART", *SUMS) else total

    def channels(self, op: Op) -> list[int]:
        """The channels of a transfer whose ends carry one transfer at a time: none or one."""
        channels, lane = self.case["channels"], [op.worker, op.peer][:: 1 if op.kind.startswith("SEND") else -1]
        return [0] if channels == "all" else [n for n, lanes in enumerate(channels or ()) if lane in lanes]

    def plan(self) -> None:
        """Fill in tasks: row -> (rows that it waits for, rows of the iteration before, queues, seconds)."""
        self.tasks: dict[Key, tuple[set[Key], set[Key], list[Key], float]] = {}
        self.queues: dict[Key, list[Key]] = defaultdict(list)
        of_kind: dict[str, list[Op]] = defaultdict(list)
        for op in self.ops:
            of_kind[op.kind].append(op)
        sends = {(*o.value, o.worker, o.peer): o.row for k in ("SEND_F", "SEND_B") for o in of_kind[k]}
        sums: dict[Key, dict[str, Key | None]] = defaultdict(dict)  # stage, bucket -> host -> the sum before
        for w in self.live:
            before = None
            for op in (op for op in self.programs[w] if op.kind in SUMS):
                sums[op.stage, op.bucket][w], before = before, op.row
        rows = {kind: {op.row for op in ops} for kind, ops in of_kind.items()}
        is_barrier, gradients = self.case["optimizer"] == "barrier", [op for op in self.ops if self.adds(op, op)]
        for w in self.live:
            last = offload = None
            for op in self.programs[w]:
                waits, carried = {other.row for other in self.needs(op)}, set[Key]()
                queues, seconds = [("worker", w)], self.seconds(op)
                own = {o.row for kind in ("STEP", "GATHER_PARAMS") for o in self.at[kind, op.stage, None, w]}
                if op.kind.startswith("RECV"):
                    row, queues = sends[(*op.value, op.peer, w)], []
                    waits.add(row)
                    for channel in self.channels(op):
                        self.queues["channel", w, channel].append(row)
                elif op.kind.startswith("SEND"):
                    ends = [("channel", end, channel) for end in (w, op.peer) for channel in self.channels(op)]
                    queues = [("lane", w, op.peer), *ends]
                elif op.kind in ("OFFLOAD", "RELOAD"):
                    queues = [(op.kind, w)]
                    waits |= {row for row in (last, offload) if row and op.kind == "RELOAD"}
                elif op.kind in SUMS:
                    arrival = (*op.row, "arrives")
                    self.tasks[arrival] = set(), set(), queues, 0.0
                    self.queues["worker", w].append(arrival)
                    hosts = sums[op.stage, op.bucket]
                    waits |= {row for row in hosts.values() if row}
                    waits |= {(*o.row, "arrives") for o in of_kind[op.kind] if o[3:] == op[3:]}
                    waits |= {o.row for o in gradients if o.stage == op.stage and self.adds(o, op)}
                    if op.kind == "REDUCE_GRAD":
                        waits |= {o.row for o in self.programs[w] if o.stage == op.stage and o.kind == "REDUCE_BUCKET"}
                    queues = [("sum", w), ("worker", w)][: 1 + (op.kind == "REDUCE_GRAD")]
                elif op.kind == "STEP":
                    (waits if is_barrier else carried).update(rows.get("REDUCE_GRAD", ()))
                elif op.kind == "GATHER_PARAMS":
                    waits |= {o.row for o in of_kind["STEP"] if o.stage == op.stage}
                elif op.kind in ("F", "R", "REPLAY"):
                    carried = own | (rows.get("STEP", set()) if is_barrier else set())
                if ("worker", w) in queues:
                    waits |= {offload} - {None, op.row}  # type: ignore[arg-type]
                    last, offload = op.row, None
                offload = op.row if op.kind == "OFFLOAD" else offload
                if op.row in self.tasks:  # the other half of a pair
                    half = self.tasks[op.row]
                    self.tasks[op.row] = waits | half[0], carried | half[1], queues, seconds + half[3]
                    continue
                for queue in queues:
                    if queue[:2] != ("channel", op.peer):  # the RECV takes its place in it
                        self.queues[queue].append(op.row)
                self.tasks[op.row] = waits, carried, queues, seconds

    def order(self) -> tuple[list[Key], Finding | None]:
        """An order in which all tasks run, or the first instruction of a cycle of waits."""
        self.plan()
        before = {row: set(waits) for row, (waits, *_) in self.tasks.items()}
        for queue in self.queues.values():
            for first, second in zip(queue, queue[1:], strict=False):
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
