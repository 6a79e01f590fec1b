"""`recycle check` of files that mean harm: exit 2 and one line with the place, quickly and in little memory."""

import gzip
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recycle import Schedule, Shape
from recycle.ir.families import one_f_one_b
from recycle.ir.formats import chrome_trace
from tests import ROOT

PLAN = one_f_one_b(Shape(1, 2, 2)).dumps()


def plan(old: str, new: str) -> bytes:
    assert PLAN.count(old) == 1
    return PLAN.replace(old, new).encode()


NATIVE = {
    "with deep metadata": (plan('"metadata": {', f'"metadata": {{"a": {"[" * 100_000}'), "not valid JSON"),
    "not UTF-8": (plan("1f1b", "@").replace(b"@", b"\xff\xfe"), "not valid JSON: 'utf-8'"),
    "with a NUL in the text": (plan("0F0.1", "\\u0000"), r"worker 0.0, position 1: '\x00' is not an instruction"),
    "with a terminal's control codes": (plan('"failed"', '"\\u001b[2J\\n"'), r"unknown field `\x1b[2J `"),
    "with more stages than memory": (plan('"ranks": 2', '"ranks": 1048576'), "pairs of worker and stage"),
    "of a giant instruction": (plan("0F0.1", "0F0.1" * 10**6), "worker 0.0, position 1: '0F0.10F0.1"),
    "with a program twice": (plan('"0.1": "', '"0.0": "'), "programs: '0.0' is there twice"),
    "with programs twice": (plan('"ties"', '"programs": {}, "ties"'), "'programs' is there twice"),
    "with a size twice": (plan('"ranks"', '"ranks": 3, "ranks"'), "shape: 'ranks' is there twice"),
    "with a placement twice": (plan("null", '{"0.0": [0], "0.0": [1]}'), "placement: '0.0' is there twice"),
    "with giant metadata": (plan('"metadata": {', f'"metadata": {{"a": "{"x" * 2**25}", '), "metadata: 335544"),
}  # fmt: skip

CSV = {
    "nested deep": (b"0F0," + b"(" * 100_000, "row 1 (rank 0), cell 2: '((((((((((((((((((((("),
    "of one giant cell": (b"0F0," + b"9" * 10**6, "line 1: field larger than field limit"),
    "of nothing but commas": (
        b"," * 2**24,
        "too large: 16,777,216 instructions, a file may hold 4,194,304: write fewer",
    ),
}

TRACES = {
    "of too many objects": (
        b'{"traceEvents": [' + b"{}," * 2**24 + b"{}]}",
        "plan.trace.json: too large: 16,777,218 JSON objects, at most 16,777,216",
    ),
    "of too many arrays": (
        b'{"traceEvents": [' + b"[]," * 2**24 + b"[]]}",
        "plan.trace.json: too large: 16,777,218 JSON arrays, at most 16,777,216",
    ),
    "with giant metadata": (
        b'{"traceEvents": [], "otherData": {"a": "' + b"x" * 2**25 + b'"}}',
        "plan.trace.json: otherData: 33,554,441 bytes, at most",
    ),
}


MANY = {
    "many.json": (
        one_f_one_b(Shape(1, 2, 2)).dumps().encode(),
        "programs: too large: 8 instructions, a file may hold 7",
    ),
    "many.csv": (b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", "too large: 7 instructions, a file may hold 6"),
    "table.json": (
        b'{"format": "megatron-schedule-table", "version": 1, "ranks": 3, "table": [[0, 0], [1, 0]]}',
        "table: on 3 ranks too large: 12 instructions, a file may hold 11",
    ),
    "orders.json": (
        b'{"format": "megatron-schedule-table", "version": 1, "ranks": 1, "orders": [[1, 1, 1, 1, 1, 1]]}',
        "orders[0], its forwards: on 1 ranks too large: 12 instructions, a file may hold 11",
    ),
    "plan.trace.json": (
        "".join(chrome_trace.dumps(one_f_one_b(Shape(1, 2, 2)))).encode(),
        "too large: 20 instructions, ",
    ),
}
"""Just above a limit that takes the place of four million."""


@pytest.mark.parametrize("name", MANY)
def test_a_file_of_more_instructions_than_the_limit_is_refused(command, tmp_path, name, monkeypatch):
    content, complaint = MANY[name]
    (tmp_path / name).write_bytes(content)
    count = int(complaint.split("too large: ")[1].split()[0])
    for most in (count, count - 1):
        for module in ("columns", "native"):
            monkeypatch.setattr(f"recycle.ir.{module}.MOST_INSTRUCTIONS", most)
        outcome = command(f"check {tmp_path}/{name}")
        assert ("too large" in outcome.err) == (most < count), outcome
    assert outcome.refused(f"{name}: {complaint}")
    assert "write fewer micro-batches or pipelines" in outcome.err


HOSTILE = {"plan.json": NATIVE, "plan.csv": CSV, "plan.trace.json": TRACES}


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, files in HOSTILE.items() for what in files])
def test_hostile_file_is_refused_with_its_place(command, name, what):
    content, complaint = HOSTILE[name][what]
    Path(name).write_bytes(content)
    outcome = command(f"check {name}")
    assert outcome.refused(f"{name}: ", complaint), outcome
    assert len(outcome.err) < 4200


def zipped(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


def dense_deadlock(ranks: int, micro_batches: int) -> str:
    """Each rank runs a random order in which every backward follows its forward."""
    draw, programs = random.Random(0), {}
    for rank in range(ranks):
        order, forwarded = [*range(micro_batches)] * 2, set()
        draw.shuffle(order)
        words = []
        for j in order:
            words.append(f"{rank}{'B' if j in forwarded else 'F'}0.{j}")
            forwarded.add(j)
        programs[f"0.{rank}"] = " ".join(words)
    return Schedule.from_text(Shape(1, ranks, micro_batches), programs).dumps()


def with_metadata(text: str) -> str:
    """A plan that cannot be read whole, which the page reads a second time, with `text` in its metadata."""
    return PLAN.replace('"metadata": {', f'"metadata": {{"a": {text}, ').replace("0F0.1", "junk")


def with_buckets(chunks: int, micro_batches: int) -> str:
    """A plan of one worker, of which lowering makes as many reduces of each chunk as there may be buckets."""
    cells = [(s, j) for s in range(chunks) for j in range(micro_batches)]
    words = [*(f"{s}F0.{j}" for s, j in cells), *(f"{s}B0.{j}" for s, j in reversed(cells))]
    return replace(Schedule.from_text(Shape(1, 1, micro_batches, chunks), {"0.0": " ".join(words)}), buckets=64).dumps()


def with_texts(key: str) -> str:
    """A timeline with two million texts under a key next to its events."""
    plan = "".join(chrome_trace.dumps(one_f_one_b(Shape(1, 2, 2))))
    texts = "".join(f'{{"\u0100{i}":"\u0101","\u0102{i}":"\u0103"}},' for i in range(700)) * 740
    return plan.replace(f'"{key}":{{', f'"{key}":{{"a":[{texts}0],', 1)


TIMELINE = '{"traceEvents": [%s]}'
SMALL_FILES = {
    "lists.json.gz": lambda: zipped(TIMELINE % ("[]," * (2**27 // 3) + "[]")),
    "few-lists.json.gz": lambda: zipped(TIMELINE % ("[]," * 10**7 + "[]")),
    "lists.json": lambda: (TIMELINE % ("[]," * (2**20 // 3 - 20) + "[]")).encode(),
    "value.json.gz": lambda: zipped(TIMELINE % ('{"name":"PP:0F0","ts":[' + "[]," * (2**20 - 50) + "[]]}")),
    "metadata.json.gz": lambda: zipped(with_metadata("[" + '{"a":[]},' * (2**20 - 50) + "0]")),
    "keys.json": lambda: with_metadata("{" + ",".join(f'"{i}":0' for i in range(90_000)) + "}").encode(),
    "spaces.json.gz": lambda: zipped(" " * 2**27),
    "deep.json": lambda: (TIMELINE % ("[" * (2**20 - 40))).encode(),
    "labels.json.gz": lambda: zipped(TIMELINE % ",".join(['{"ph":"X","name":"PP:0F0","pid":0,"ts":0}'] * 100_000)),
    "words.json.gz": lambda: zipped(PLAN.replace('"0.0": "', '"0.0": "' + "0SEND_F0@0.1 " * 100_000)),
    "cells.csv.gz": lambda: zipped("0F0," * (2**22 - 10) + "0B0"),
    "table.json": lambda: json.dumps(
        {"format": "megatron-schedule-table", "version": 1, "ranks": 1000, "table": [[j, 0] for j in range(2000)]}
    ).encode(),
    "buckets.json": lambda: (
        replace(Schedule.from_text(Shape(1, 4096, 1), {f"0.{r}": f"{r}B0.0 {r}F0.0" for r in range(4096)}), buckets=64)
        .dumps()
        .encode()
    ),
    "chunks.json": lambda: Schedule.from_text(Shape(1, 1, 4, 2**20), {}).dumps().encode(),
    "cells.json": lambda: Schedule.from_text(Shape(1, 1, 16, 2**20), {}).dumps().encode(),
    "wide-buckets.json.gz": lambda: zipped(with_buckets(2**15, 1)),
    "long-buckets.json.gz": lambda: zipped(with_buckets(2**12, 32)),
    "timeline-metadata.json.gz": lambda: zipped(with_texts("metadata")),
    "timeline-profile.json.gz": lambda: zipped(with_texts("profile")),
    "deadlock.json.gz": lambda: zipped(dense_deadlock(180, 1024)),
}
"""Files of at most 1 MiB that cost most."""
TO_CHECK = ("lists.json.gz", "words", "cells", "table", "buckets", "chunks", "wide", "long", "deadlock")
ONLY_CHECKED = ("words", "cells.csv", "long", "deadlock")
"""The page reads and checks them as the command does."""
FIFTHS = ("labels", "words")
"""Their cost is in proportion to their words, of which a file may hold five times as many: a fifth is allowed."""
MEASURED = """
import contextlib, gc, io, sys, time
from pathlib import Path
from recycle.cli import main
from recycle.errors import RecycleError
from recycle.ir.event_graph import compile_all
from viz.pages.validate_page import inspect
compile_all()
for way in sys.argv[1:]:
    how, path = way.split(":")
    gc.collect()  # what one file leaves is not of the next
    begin = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit, RecycleError):
            main(["check", path]) if how == "check" else inspect(Path(path).read_bytes(), path)
    most = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]  # ru_maxrss counts the parent's too
    print(way, time.process_time() - begin, int(most) * 1024, flush=True)
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_small_file_costs_less_than_a_gigabyte_and_20_seconds():
    for name, make in SMALL_FILES.items():
        Path(name).write_bytes(content := make())
        assert len(content) <= 2**20
    # The page reads as the command does, but refuses large schedules before it checks them.
    ways = [f"validate:{name}" for name in SMALL_FILES if not name.startswith(ONLY_CHECKED)]
    ways += [f"check:{name}" for name in SMALL_FILES if name.startswith(TO_CHECK)]
    command = [sys.executable, "-c", MEASURED, *ways]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [way for way, *_ in rows] == ways
    for way, seconds, memory in rows:
        is_fifth = way.partition(":")[2].startswith(FIFTHS)
        assert float(seconds) <= (4 if is_fifth else 20), rows
        assert int(memory) <= (2**29 if is_fifth else 2**30), rows


@pytest.mark.parametrize("line", ["simulate plan.json --json", "convert plan.json plan.trace.json"])
def test_overflowing_times_are_refused(command, line):
    Path("plan.json").write_text(PLAN)
    assert command(f"{line} --times=1e308,1,1").refused(
        "the times add up to more than 1e+100: state them in another unit"
    )


@pytest.mark.parametrize("line", ["check {}", "simulate {}", "convert {} --to native out", "view {} --export o.svg"])
def test_every_command_refuses_a_pipe(command, line):
    os.mkfifo("pipe.json")
    assert command(line.format("pipe.json")).refused("pipe.json: cannot be read (not a regular file")
