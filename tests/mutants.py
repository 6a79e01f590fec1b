"""Plants one defect at a time in a copy of the tree and runs the tests that should find it.

    python -m tests.mutants [--only NAME,...] [--jobs N] [--explore SEEDS] [--list]

`tests/mutants.toml` holds the defects: the text of a file before and after, the promise that the change breaks, and the
tests that are run, in order, until one fails. Exit code 1 when a defect survives. After code has moved, a mutant keeps
its name and its promise and gets another place.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType

import msgspec

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
CONTROL_PLANE = "recycle/exec/(leader|worker|agent|launch|election|checkpoint|links)"
"""Files whose defects exploration should find."""
TIMEOUT = 900.0
"""Seconds for the tests of a mutant; a hang counts as found."""


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
            if done.returncode not in (0, 5):
                raise RuntimeError(f"{mutant.name}: pytest {tests} ended with {done.returncode}\n{done.stdout[-2000:]}")
    return None


def plant(name: str) -> None:
    """Have this process import the defect, without a copy of the tree."""
    (mutant,) = (mutant for mutant in load_mutants() if mutant.name == name)
    module, path = mutant.file.removesuffix(".py").replace("/", "."), str(ROOT / mutant.file)

    class Planter(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            return compile(mutated(mutant), path, "exec")

        @staticmethod
        def find_spec(fullname: str, *_: object) -> ModuleSpec | None:
            return spec_from_file_location(fullname, path, loader=Planter(module, path)) if fullname == module else None

    sys.meta_path.insert(0, Planter(module, path))


def seed_of(mutant: Mutant, seeds: int) -> str | None:
    """The first seed of tests.exec.explore that finds the defect, and the rule; None where it survives."""
    code = (
        f"from tests.mutants import plant; plant({mutant.name!r}); import runpy;"
        " runpy.run_module('tests.exec.explore', run_name='__main__')"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, "--find", str(seeds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or (done.returncode and not done.stdout.startswith("seed")):
        raise RuntimeError(f"{mutant.name}: the exploration ended with {done.returncode}\n{done.stderr[-2000:]}")
    return ":".join(done.stdout.split(":")[:2]) or None


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
    finds: Callable[[Mutant], str | None] = partial(seed_of, seeds=seeds) if seeds else killer_of
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name:<55} {mutant.breaks}")
        return 0
    survivors = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutant, killer in zip(mutants, pool.map(finds, mutants), strict=True):
            survivors += killer is None
            print(f"{mutant.name:<55} {killer or 'SURVIVES'}", flush=True)
    print(f"{len(mutants)} mutants, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
