"""Plants one defect at a time in a copy of the tree and runs the tests that should find it.

    python -m tests.mutants [--only NAME,...] [--jobs N] [--explore SEEDS] [--list]

`tests/mutants.toml` holds the defects: the text of a file before and after, the promise that the change breaks, and the
tests that are run, in order, until one fails. Exit code 1 when a defect survives. After code has moved, a mutant keeps
its name and its promise and gets another place.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType

import msgspec
import pytest

from recycle.exec.launch.agent import rarely_collect_garbage
from tests.exec.explore.stories import draw_scenario, violation_of

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
CONTROL_PLANE = "recycle/exec/(leader|worker|agent|launch|election|checkpoint|links)"
"""Files whose defects exploration should find."""
TIMEOUT = 900.0
"""Seconds for the tests of a mutant; a hang counts as found."""
KNOWN_SEEDS = 150
"""Seeds that run without defects first."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A defect.

    Attributes:
        name: unique.
        breaks: the promise that no longer holds.
        file: relative to the root of the tree.
        before, after: text that occurs once in the file, and what replaces it.
        tests: files or folders that are run until one fails.
    """

    name: str
    breaks: str
    file: str
    before: str
    after: str
    tests: list[str]


class MutantTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    mutant: list[Mutant]


def load_mutants(path: Path = TABLE) -> list[Mutant]:
    return msgspec.toml.decode(path.read_bytes(), type=MutantTable).mutant


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the mutant's file with the defect. Raises ValueError where the text does not occur exactly once."""
    text = (root / mutant.file).read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.name}: the text before occurs {text.count(mutant.before)} times in {mutant.file}")
    return text.replace(mutant.before, mutant.after)


def killer_of(mutant: Mutant) -> str | None:
    """The first test that finds the defect; None where it survives."""
    with tempfile.TemporaryDirectory(prefix="recycle-mutant-") as name:
        copy = Path(name)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for path in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / path).is_file():
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, copy / path)
        (copy / mutant.file).write_text(mutated(mutant))
        environment = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1", "RECYCLE_CACHE": f"{name}/.cache"}
        for tests in mutant.tests:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", tests]
            try:
                done = subprocess.run(
                    command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
                )
            except subprocess.TimeoutExpired:
                return f"{tests} (hangs)"
            if done.returncode == 1:
                return next((line for line in done.stdout.splitlines() if line.startswith("FAILED")), tests)
            if done.returncode == pytest.ExitCode.INTERNAL_ERROR and "Timeout" in done.stdout:
                return f"{tests} (hangs)"
            if done.returncode not in (0, 5):
                raise RuntimeError(f"{mutant.name}: pytest {tests} ended with {done.returncode}\n{done.stdout[-2000:]}")
    return None


def plant(mutant: Mutant) -> None:
    """Give the functions of this process that the defect changes their code with the defect."""
    codes, waiting = dict[str, CodeType](), [compile(mutated(mutant), str(ROOT / mutant.file), "exec")]
    while waiting:
        found = [constant for constant in waiting.pop().co_consts if isinstance(constant, CodeType)]
        codes.update((code.co_qualname, code) for code in found)
        waiting += found
    module = mutant.file.removesuffix(".py").replace("/", ".")
    gc.unfreeze()
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__module__ == module:
            function.__code__ = codes.get(function.__code__.co_qualname, function.__code__)
    gc.freeze()


def seed_of(mutant: Mutant, seeds: int) -> str | None:
    """The first seed of tests.exec.explore that finds the defect, and the rule; None where it survives."""
    plant(mutant)
    found = ((seed, violation_of(draw_scenario(seed))) for seed in range(seeds))
    return next((f"seed {seed}: {violation.rule}" for seed, violation in found if violation is not None), None)


def explore(mutants: list[Mutant], seeds: int, jobs: int) -> Iterator[str | None]:
    """`seed_of` of each mutant, in a process that has plans and references of the code without defects."""
    rarely_collect_garbage()
    for seed in range(min(seeds, KNOWN_SEEDS)):
        violation_of(draw_scenario(seed))
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap(partial(seed_of, seeds=seeds), mutants, chunksize=1)


def kill_by_tests(mutants: list[Mutant], jobs: int) -> Iterator[str | None]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(killer_of, mutants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--list", action="store_true", help="print names and promises, and run nothing")
    parser.add_argument("--explore", type=int, metavar="SEEDS", help="run seeds of tests.exec.explore, not the tests")
    arguments = parser.parse_args()
    mutants, seeds = load_mutants(), arguments.explore
    if arguments.only:
        mutants = [mutant for mutant in mutants if mutant.name in arguments.only.split(",")]
    elif seeds:
        mutants = [mutant for mutant in mutants if re.match(CONTROL_PLANE, mutant.file)]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name:<55} {mutant.breaks}")
        return 0
    survivors = 0
    killers = explore(mutants, seeds, arguments.jobs) if seeds else kill_by_tests(mutants, arguments.jobs)
    for mutant, killer in zip(mutants, killers, strict=True):
        survivors += killer is None
        print(f"{mutant.name:<55} {killer or 'SURVIVES'}", flush=True)
    print(f"{len(mutants)} mutants, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
