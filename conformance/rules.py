"""The rules of schedules for the interpreter, written from docs/reference/file-format.md and codes.md alone.

A rule examines one instruction, micro-batch or worker at a time. `NOT_MODELLED` are the rules that are left out; ties
of stages and cuts are not known either.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

Finding = tuple[str, "str | None", "int | None", "str | None"]
Key = tuple[Any, ...]
NOT_MODELLED = {"late-send", "unused-transfer"}
"""Rules of style, which are warnings and which no case expects."""
_TEXT = re.compile(r"(\d+)([A-Z_]+)(?:(\d+\.\d+))?(?:/(\d+))?(?:@(\d+\.\d+))?")
_MAKES = {"F": "A", "B": "GW", "I": "G", "W": "W", "W_PART": "W"}
_AFTER = {
    "B": ("F", "RELOAD"), "I": ("F", "RELOAD"), "W": ("I",), "W_PART": ("I",), "OFFLOAD": ("F",),
    "RELOAD": ("OFFLOAD",), "SEND_F": ("F",), "SEND_B": ("B", "I"), "WAIT_SEND_F": ("SEND_F",),
    "WAIT_SEND_B": ("SEND_B",), "STEP": ("REDUCE_GRAD",), "GATHER_PARAMS": ("STEP",),
}  # fmt: skip
_KEPT_BY = {"W": "I", "W_PART": "I"}
_ONCE = ("REDUCE_GRAD", "STEP", "GATHER_PARAMS", "REDUCE_BUCKET")
SUMS = ("REDUCE_GRAD", "REDUCE_BUCKET")


class Op(NamedTuple):
    """One instruction, or one half of a pair; `row` orders the instructions of all workers."""

    row: tuple[int, int]
    worker: str
    text: str
    stage: int
    kind: str
    micro_batch: str | None
    bucket: int | None
    peer: str | None

    @property
    def place(self) -> tuple[str, int, str]:
        return self.worker, self.row[1], self.text

    @property
    def value(self) -> Key:
        """The value that a transfer carries, or that a WAIT_SEND waits for: kind, producing stage, micro-batch."""
        is_activation = self.kind.endswith("F")
        produced_by = self.stage + (0 if "SEND" in self.kind else -1 if is_activation else 1)
        return "A" if is_activation else "G", produced_by, self.micro_batch


class Programs:
    """The programs of one case."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, (self.pipelines, ranks, self.micro_batches, chunks) = case, case["shape"]
        self.stages, self.buckets = ranks * chunks, case["buckets"]
        self.workers = [f"{k}.{r}" for k in range(self.pipelines) for r in range(ranks)]
        self.placement = {w: range(int(w.split(".")[1]), self.stages, ranks) for w in self.workers} | case["placement"]
        self.live = [w for w in self.workers if w not in case["failed"]]
        self.hosts = {s: [w for w in self.live if s in self.placement[w]] for s in range(self.stages)}
        self.programs = {w: list(self._read(w, case["programs"].get(w, ""))) for w in self.workers}
        self.ops = [op for w in self.workers for op in self.programs[w]]
        self.has_transfers = any(op.peer for op in self.ops)
        self.has_optimizer = any(op.kind in _ONCE for op in self.ops)
        self.made = {(v, op.stage, op.micro_batch): op for op in self.ops[::-1] for v in _MAKES.get(op.kind, "")}
        self.at: dict[Key, list[Op]] = defaultdict(list)
        for op in self.ops:
            self.at[op.kind, op.stage, op.micro_batch, op.worker].append(op)

    def _read(self, worker: str, program: str) -> Iterator[Op]:
        for position, text in enumerate(program.split()):
            for part in text.strip("()").split(";"):
                stage, kind, micro_batch, bucket, peer = _TEXT.fullmatch(part).groups()  # type: ignore[union-attr]
                row = (self.workers.index(worker), position)
                yield Op(row, worker, text, int(stage), kind, micro_batch, int(bucket) if bucket else None, peer)

    def find(self, op: Op, *kinds: str) -> list[Op]:
        """The instructions of the same worker, stage and micro-batch."""
        return [other for kind in kinds for other in self.at[kind, op.stage, op.micro_batch, op.worker]]

    def crossing(self, op: Op) -> list[Key]:
        """The values of other stages that a computation needs."""
        needs = {"F": "A", "B": "G", "I": "G", "REPLAY": "AG", "R": "A"}.get(op.kind, "")
        values = [(v, op.stage + (-1 if v == "A" else 1), op.micro_batch) for v in needs]
        return [value for value in values if 0 <= value[1] < self.stages]

    # The rules, in groups: a group presumes that those before it found nothing.

    def findings(self) -> list[Finding]:
        groups = (self.outside, self.incomplete, self.transfers, self.updates, self.disorder)
        return next((found for group in groups if (found := list(dict.fromkeys(group())))), [])

    def outside(self) -> Iterator[Finding]:
        first: dict[Key, Op] = {}
        for op in self.ops:
            pipeline, index = map(int, (op.micro_batch or "0.0").split("."))
            last = self.buckets - (op.kind == "REDUCE_BUCKET")
            if op.worker not in self.live:
                first.setdefault(("failed-worker", op.worker), op)
            elif not 0 <= op.stage < self.stages:
                first.setdefault(("stage-range", op.worker), op)
            elif pipeline >= self.pipelines or index >= self.micro_batches:
                first.setdefault(("micro-batch-range", op.worker), op)
            elif op.bucket is not None and op.bucket >= last:
                first["bucket-range", op.row] = op
            elif self.case["forward_only"] and op.kind not in ("F", "SEND_F", "RECV_F", "WAIT_SEND_F"):
                first["beyond-forward", op.row] = op
            elif op.peer and op.peer not in self.live and not self.programs[op.peer]:
                first.setdefault(("failed-worker", op.worker, op.peer), op)
            elif not op.peer and op.stage not in self.placement[op.worker]:
                first.setdefault(("not-hosted", op.worker, op.stage), op)
        yield from ((key[0], *op.place) for key, op in first.items())
        yield from (("no-host", None, None, None) for hosts in self.hosts.values() if not hosts)
        values = ((op, self.made[v]) for op in self.ops for v in self.crossing(op) if v in self.made)
        crosses = any(op.worker != maker.worker for op, maker in values)
        lacks = (crosses and not self.has_transfers) or not (self.has_optimizer or self.case["forward_only"])
        if lacks and not self.case["implied"]:
            yield "not-lowered", None, None, None

    def incomplete(self) -> Iterator[Finding]:
        cells: dict[Key, list[Op]] = defaultdict(list)
        for op in self.ops:
            if op.kind in _MAKES:
                cells[op.stage, op.micro_batch].append(op)
        every = [f"{k}.{i}" for k in range(self.pipelines) for i in range(self.micro_batches)]
        holes: dict[Key, Op] = {}
        for stage, micro_batch in ((s, b) for s in range(self.stages) for b in every):
            ops = cells[stage, micro_batch]
            kinds = [op.kind for op in ops]
            if not ops:
                yield "missing", None, None, None
                continue
            doubled = [op for n, op in enumerate(ops) if (op.kind, op.bucket) in [(o.kind, o.bucket) for o in ops[:n]]]
            yield from (("duplicate", *op.place) for op in doubled)
            halves = [op for op in ops if op.kind in ("I", "W", "W_PART")]
            parts = [op for op in ops if op.kind == "W_PART"]
            if "B" in kinds and halves:
                yield ("mixed-backward", *halves[0].place)
            elif parts and ("W" in kinds or len({op.bucket for op in parts}) < self.buckets):
                yield ("weight-parts", *parts[0].place)
            if self.case["forward_only"]:
                continue
            split = "B" not in kinds and halves
            lacking = ("F" not in kinds, not ("B" in kinds or halves), split and "I" not in kinds,
                       split and not {"W", "W_PART"} & {*kinds})  # fmt: skip
            for what in (n for n, is_so in enumerate(lacking) if is_so):
                op = next(op for op in ops if what < 3 or op.kind == "I")
                key = (what, op.worker, stage)
                holes[key] = min(op, holes.get(key, op))
            if not any(lacking):
                by_kind = {op.kind: op for op in ops}
                away = [op for op in ops if op.worker != by_kind.get(_KEPT_BY.get(op.kind, "F"), by_kind["F"]).worker]
                yield from (("apart", *op.place) for op in away[:1])
        yield from (("missing", *op.place) for op in holes.values())

    def transfers(self) -> Iterator[Finding]:
        sends, receives, reported = dict[Key, Op](), dict[Key, Op](), set[Key]()
        for op in (op for op in self.ops if op.peer):
            is_send = op.kind.startswith("SEND")
            ends, key = (sends, (op.worker, op.peer)) if is_send else (receives, (op.peer, op.worker))
            away = is_send and (op.value not in self.made or self.made[op.value].worker != op.worker)
            if op.peer != op.worker and (*op.value, *key) not in ends and not away:
                ends[*op.value, *key] = op
            elif op.value not in reported:
                reported.add(op.value)
                code = "wrong-peer" if op.peer == op.worker else "not-made-here" if away else "duplicate-transfer"
                yield (code, *op.place)
        matched = [key for key in sends if key in receives]
        alone = {key[:3]: op for key, op in receives.items() if key not in sends and key[:3] not in reported}
        for key, send in sends.items():
            if key in receives or key[:3] in reported:
                continue
            users = [op.worker for op in self.ops if key[:3] in self.crossing(op)]
            if receive := alone.pop(key[:3], None):
                yield ("wrong-peer", *(receive if send.peer in users else send).place)
            else:
                yield ("unreceived", *send.place)
        yield from (("unsent", *op.place) for op in alone.values())
        for lane in sorted({key[3:] for key in matched}):
            keys = [key for key in matched if key[3:] == lane]
            got, sent = (sorted(keys, key=lambda key: ends[key].row) for ends in (receives, sends))
            wrong = [key for key, other in zip(got, sent, strict=True) if key != other]
            yield from (("fifo", *receives[key].place) for key in wrong[:1])
        yield from self.values(sends)

    def values(self, sends: dict[Key, Op]) -> Iterator[Finding]:
        """Rules for what an instruction uses of other instructions of its stage and micro-batch."""
        for op in self.ops:
            for value in self.crossing(op):
                away = value in self.made and self.made[value].worker != op.worker
                brought = self.find(op, "RECV_F" if value[0] == "A" else "RECV_B")
                sent = away and (*value, self.made[value].worker, op.worker) in sends
                if op.kind != "R" and self.has_transfers and away and not brought and not sent:
                    yield ("no-transfer", *op.place)
            own, before = self.find(op, "F"), [o for o in self.find(op, op.kind) if o.row < op.row]
            if op.kind == "R":
                back = [o for kind in "BI" for o in self.at[kind, op.stage - 1, op.micro_batch, op.worker]]
                source = self.at["F", op.stage - 1, op.micro_batch, op.worker]
                if before or own or not source or any(o.row < op.row for o in back):
                    yield ("redundant", *op.place)
            elif op.kind == "REPLAY":
                reduces = self.at["REDUCE_GRAD", op.stage, None, op.worker]
                if before or own or any(o.row < op.row for o in reduces):
                    yield ("replay", *op.place)
            elif op.kind in ("OFFLOAD", "RELOAD"):
                other = "RELOAD" if op.kind == "OFFLOAD" else "OFFLOAD"
                if not own or before or not self.find(op, other):
                    yield ("offload", *op.place)
            elif op.kind.startswith("WAIT_SEND") and not self.find(op, op.kind[5:]):
                yield ("wait-send", *op.place)

    def updates(self) -> Iterator[Finding]:
        orders: dict[str, list[Key]] = {}
        for w in self.live if self.has_optimizer else ():
            own = [op for op in self.programs[w] if op.kind in _ONCE]
            seen = {(op.kind, op.stage, op.bucket) for op in own}
            kinds = [(kind, None) for kind in _ONCE[:2]] + [("REDUCE_BUCKET", b) for b in range(self.buckets - 1)]
            kinds += [("GATHER_PARAMS", None)] * any(op.kind == "GATHER_PARAMS" for op in self.ops)
            for kind, bucket in kinds:
                if any((kind, s, bucket) not in seen for s in self.placement[w]):
                    nowhere = bucket is None and all(op.kind != kind for op in self.ops)
                    code = f"missing-{kind.split('_')[0].lower() if bucket is None else 'bucket'}"
                    yield code, None if nowhere else w, None, None
            for n, op in enumerate(own):
                before = {o[3:] for o in own[:n]}
                if op[3:] in before:
                    yield ("duplicate-update", *op.place)
                waits = op.kind == "STEP" and self.case["optimizer"] == "barrier"
                if waits and any(o.kind == "REDUCE_GRAD" and o[3:] not in before for o in own[n:]):
                    yield ("early-step", *op.place)
                late = [o for o in self.programs[w] if o.row > op.row and o.stage == op.stage and self.adds(o, op)]
                if op.kind in SUMS and late:
                    yield (f"early-{'bucket' if op.bucket is not None else 'reduce'}", *op.place)
            orders[w] = [(op.stage, op.kind, op.bucket) for op in own if op.kind != "STEP"]
            if len({*orders[w]}) < len(orders[w]):
                continue
            for other in (o for v, o in orders.items() if v != w):
                shared = [key for key in orders[w] if key in other]
                pairs = [a for a, b in combinations(shared, 2) if other.index(b) < other.index(a)]
                if pairs:
                    op = next(op for op in own if (op.stage, op.kind, op.bucket) == pairs[0])
                    yield ("reduce-order", *op.place)
                    break

    def adds(self, op: Op, total: Op) -> bool:
        """Whether a computation adds to what REDUCE_GRAD or REDUCE_BUCKET sums."""
        return "W" in _MAKES.get(op.kind, "") and (None in (op.bucket, total.bucket) or op.bucket == total.bucket)

    def needs(self, op: Op) -> list[Op]:
        """The instructions of this worker, and the values of other stages, that an instruction waits for."""
        needed = self.find(op, *_AFTER.get(op.kind, ()))
        for value in self.crossing(op):
            is_here = not self.has_transfers or self.made[value].worker == op.worker
            needed += [self.made[value]] if is_here else self.find(op, "RECV_F" if value[0] == "A" else "RECV_B")
        return needed

    def disorder(self) -> Iterator[Finding]:
        for op in self.ops:
            if any(other.worker == op.worker and other.row > op.row for other in self.needs(op)):
                yield ("order", *op.place)
