"""Writes conformance/cases: python -m tests.conformance_cases

Broken cases are the examples of tests/ir/test_check.py. Expected verdicts are those of recycle, which
tests/test_conformance.py compares with those of the interpreter.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from random import Random
from typing import Any

from conformance.recycle_checker import check
from conformance.run import DEFAULTS
from recycle import Schedule, Shape, lower
from recycle.ir.communicators import lanes_of, share_communicators
from recycle.ir.families import FAMILIES, TWO_CHUNKS, dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1
from recycle.ir.formats import torch_csv
from recycle.ir.lower import forward_only
from recycle.ir.replays import with_replays
from recycle.ir.schedule import loop_placement
from tests import CASES, ROOT
from tests.ir.random_schedules import random_schedule, with_waits
from tests.ir.test_check import BASES, DEFECTS, EDITS, RULE_EXAMPLES, edited, two_ranks

FOLDER = ROOT / "conformance" / "cases"
UNIT = {"F": 1, "I": 1, "W": 1}
TIMES = {**UNIT, "transfer": 0.25, "reduce": 2, "step": 0.5}
Case = dict[str, Any]


def case(name: str, schedule: Schedule, times: Case = UNIT, **options) -> Case:
    """One case with recycle's verdict; keys with default values are left out."""
    given = {"name": name, **described(schedule, times, **options)}
    return {**given, "expect": check({**DEFAULTS, **given})}


def described(schedule: Schedule, times: Case, **options) -> Case:
    """The keys of a case without name and verdict, and without those that have their defaults."""
    shape = schedule.shape
    given = {"shape": [shape.pipelines, shape.ranks, shape.micro_batches, shape.chunks]}
    if schedule.placement != loop_placement(shape):
        given["placement"] = {str(w): list(schedule.stages_of(w)) for w in shape.workers()}
    given |= {"failed": sorted(map(str, schedule.failed)), "optimizer": schedule.optimizer, "times": times, **options}
    given |= {"buckets": schedule.buckets, "forward_only": schedule.forward_only}
    given["programs"] = {worker: text for worker, text in schedule.text().items() if text}
    return {key: value for key, value in given.items() if DEFAULTS.get(key, ...) != value}


def families() -> Iterator[Case]:
    for n, (name, family) in enumerate(FAMILIES.items()):
        chunks = 2 if name in TWO_CHUNKS or name in ("interleaved", "looped-bfs") else 1
        for shape in (Shape(1, 3, 6, chunks), Shape(2, 2, 4, chunks)):
            optimizer = "barrier" if (n + shape.pipelines) % 2 else "staggered"
            schedule = lower(family(shape, optimizer=optimizer))
            yield case(f"{name}, {optimizer}", schedule, TIMES if shape.pipelines == 2 else UNIT)
    uneven = {**TIMES, "F": [1, 2, 1], "speed": {"0.1": 1.5}, "transfer": {"0.0>0.1": 2, "0.2>0.1": 1}}
    for channels in ("all", None):
        yield case("1f1b, uneven stages", lower(one_f_one_b(Shape(1, 3, 4))), uneven, channels=channels)
    yield case("pairs", lower(dualpipe_v(Shape(1, 2, 6, 2))), {**UNIT, "pair": 2.5})
    yield case("evaluation", lower(forward_only(gpipe(Shape(2, 2, 3)))), TIMES)
    yield case("buckets", lower(replace(zb_h1(Shape(2, 2, 3)), buckets=3)), TIMES)
    yield case("buckets, barrier", BASES["buckets"], TIMES)
    long = {**TIMES, "reduce": [9, 1, 5, 3]}
    yield case("buckets of several stages", lower(replace(interleaved(Shape(2, 2, 2, 2)), buckets=2)), long)
    yield case("gathers", lower(replace(interleaved(Shape(2, 2, 2, 2)), gathers=True)), {**TIMES, "gather": 0.75})
    yield case("replays", with_replays(one_f_one_b(Shape(2, 2, 4)), 2).schedule(0), TIMES)
    for name in ("offload", "redundant"):
        yield case(name, lower(BASES[name]), {**TIMES, "copy": 0.75})


def failures() -> Iterator[Case]:
    """Peers run the micro-batches of failed workers, in random orders, and over channels that lanes share."""
    random = Random(0)
    schedules = (random_schedule(random, 3) for _ in count())
    for n, schedule in enumerate(islice((each for each in schedules if each.failed), 12)):
        yield case(f"random order {n}", lower(schedule), TIMES, channels=(None, "all")[n % 2])
    programs = one_f_one_b(Shape(6, 2, 5)).text()
    for n, pipeline in enumerate(range(1, 6)):
        programs[f"{pipeline}.1"] += f" 1F0.{n} 1B0.{n}"
    spread = lower(Schedule.from_text(Shape(6, 2, 5), programs | {"0.1": ""}, failed=["0.1"]))
    programs = spread.text()
    for n in range(5):  # valid on lanes of their own, where a RECV does not hold up the program
        receive = f"0RECV_B0.{n}@{n + 1}.1 "
        programs["0.0"] = receive + programs["0.0"].replace(receive, "")
    early = Schedule.from_text(Shape(6, 2, 5), programs, failed=["0.1"])
    for name, schedule in (("channels of several lanes", spread), ("deadlock on a shared channel", early)):
        channels = [[[*map(str, lane)] for lane in of] for of in share_communicators(lanes_of(schedule)) if len(of) > 1]
        yield case(name, schedule, TIMES, channels=channels)


def torch() -> Iterator[Case]:
    """Schedules as torch 2.13 lowers them (`_add_reduce_grad`, then `_add_send_recv`)."""
    random, times = Random(1), {**TIMES, "transfer": 1.5}
    for name in ("torch_interleaved", "torch_split_v"):
        schedule = torch_csv.loads((CASES / f"{name}.csv").read_text())
        waiting = with_waits(random, schedule)
        for channels in (None, "all"):
            yield case(name, schedule, times, channels=channels)
            yield case(f"{name}, with waits for sends", waiting, times, channels=channels)


def broken() -> Iterator[Case]:
    for n, (code, base, worker, old, new, _) in enumerate(EDITS):
        yield broken_case(f"{code} {n}", edited(base, worker, old, new))
    for code, (schedule, _, _) in RULE_EXAMPLES.items():
        if code not in ("late-send", "unused-transfer"):
            yield broken_case(code, schedule)
    for name in ("4 backward twice and never", "6 deadlock across ranks", "7 receives out of order", "12 W before I"):
        first, second, micro_batches, _ = DEFECTS[name]
        yield broken_case(name[2:].strip(), two_ranks(first, second, micro_batches))
    first, second, _, _ = DEFECTS["16 unsafe where serialised"]
    for channels in ("all", None):
        yield broken_case("one channel per worker", two_ranks(first, second), channels=channels)
    yield case("not lowered", gpipe(Shape(1, 2, 2)))
    yield case("too many activations", lower(gpipe(Shape(1, 2, 3))), limits=[2, 3])
    yield case("too many bytes", lower(gpipe(Shape(1, 2, 3))), {**UNIT, "static": 4}, byte_limit=6)
    yield case("too many bytes for its stage", lower(gpipe(Shape(1, 2, 3))), {**UNIT, "static": 7}, byte_limit=6)


def broken_case(name: str, schedule: Schedule, **options) -> Case:
    return case(name, schedule, implied=is_implied(schedule), **options)


def is_implied(schedule: Schedule) -> bool:
    """Whether the schedule leaves out transfers, reduces or steps."""
    return len(lower(schedule).columns) > len(schedule.columns)


FAMILY_FILES = {"families": families, "failures": failures, "broken": broken, "torch": torch}


def text_of(cases: Iterator[Case]) -> str:
    """JSON with a line per program, and one for the rest of a case before and after the programs."""
    texts = []
    for each in cases:
        *head, _, expected = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in each.items())
        lines = json.dumps(each["programs"], indent=4).replace("}", "  }")
        texts.append(f'  {{{", ".join(head)},\n   "programs": {lines},\n   {expected}}}')
    return "[\n" + ",\n".join(texts) + "\n]\n"


if __name__ == "__main__":
    for name, cases in FAMILY_FILES.items():
        (FOLDER / f"{name}.json").write_text(text_of(cases()), encoding="utf-8")
