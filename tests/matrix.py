"""Tests with every interpreter and version of megatron-core that is installed, and a table of the results.

    make matrix                                   # tests; exit status 1 if any fails
    make matrix MATRIX_OPTIONS=--types            # only types: names and calls that a megatron-core lacks
    make matrix-setup MATRIX_PYTHON=python3.13    # makes an environment of several gigabytes
    make matrix-setup MATRIX_PYTHON=python3.13 MATRIX_TORCH=2.15.0

An environment is a folder in `build/matrix` with `bin/python` and, in `megatron-core/VERSION`, copies of megatron-core,
which are put first on the path. The environment that runs this file is tested too, with the version installed there.
This file imports the standard library only, so that a bare interpreter can make an environment.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "matrix"
VERSIONS = {"0.16.1": (3, 11), "0.17.1": (3, 12), "0.18.2": (3, 12), "0.19.2": (3, 12)}
"""Version of megatron-core -> the first Python that it supports."""
PARTS = {
    "kill": ("tests/exec/model/test_tied.py::test_any_worker_may_die_and_rejoin_with_the_same_bits",),
    "loop": ("tests/megatron/test_loop.py",),
    "own model": ("tests/examples/test_scripts.py::test_a_job_trains_to_the_same_bits_through_a_failure",),
    "engine": ("tests/exec/model/test_families.py",),
    "providers": ("tests/exec/model/test_providers.py",),
}
"""Part of the table -> tests, as pytest takes them."""
ALL_PARTS = {
    "versions": ("tests/test_megatron_versions.py",),
    "model": ("tests/exec/model",),
    "megatron": ("tests/megatron",),
    "hugging face": ("tests/hugging_face",),
    "examples": ("tests/examples/test_scripts.py",),
    "printed": ("tests/test_printed_commands.py",),
}
"""Parts with `--all`: everything that uses megatron-core's modules."""
PROBE = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import megatron.core, torch
    from recycle import Job
    from recycle.errors import VersionWarning
    from recycle.exec import run
    from recycle.ir.families import zb_h1
    shape = "[shape]\\npipelines = 1\\nranks = 2\\nmicro_batches = 4\\n"
    job = Job.from_toml(shape + "[model]\\nlayers = 4\\nhidden = 32\\nheads = 2\\nsequence = 16\\n")
    losses = run(zb_h1(job.shape), job, steps=3).losses
told = [str(each.message) for each in caught if issubclass(each.category, VersionWarning)]
print(json.dumps([sys.version.split()[0], torch.__version__, megatron.core.__version__, losses, told]))
"""
"""Trains a tiny model in one process."""
MISFIT = re.compile(r"(\S+: error: .*)  \[(attr-defined|call-arg|import-not-found|override)\]")
KNOWN = re.compile(r'"backward_step"|"\w+Interface" has no attribute|module named "(?!megatron|torch)')
"""`run_backward_step` asks for its parameters; 0.19 describes layers by interfaces that leave attributes out."""


@dataclass(frozen=True)
class Environment:
    """An interpreter and the copy of megatron-core that it takes; None for the installed one."""

    name: str
    python: Path
    megatron: Path | None

    def run(self, arguments: Sequence[str], log: Path) -> bool:
        """Run the interpreter; what it prints goes to the file, errors beside it. Whether its exit status is 0."""
        paths = [str(ROOT), *([str(self.megatron)] if self.megatron else [])]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        with log.open("w") as output, log.with_suffix(".err").open("w") as errors:
            done = subprocess.run([str(self.python), *arguments], cwd=ROOT, env=variables, stdout=output, stderr=errors)
        return done.returncode == 0


@dataclass(frozen=True)
class Row:
    """Results of one environment.

    Attributes:
        versions: of Python, torch and megatron-core.
        losses: of a short run, which must be those of every megatron-core with the same Python and torch.
        cells: part -> its result in words.
        failed: what failed.
    """

    versions: tuple[str, str, str]
    losses: tuple[float, ...]
    cells: Mapping[str, str]
    failed: Sequence[str]


def environments(folder: Path, *, with_own: bool) -> list[Environment]:
    """The environments below a folder, by name and version, and the one that runs this file."""
    found = [Environment("default", Path(sys.executable), None)] if with_own else []
    for python in sorted(folder.glob("*/bin/python")):
        home = python.parents[1]
        copies = sorted((home / "megatron-core").glob("*"), key=lambda copy: [int(n) for n in copy.name.split(".")])
        found += [Environment(f"{home.name}-{copy.name}", python, copy) for copy in copies]
    return found


def examine(environment: Environment, parts: Mapping[str, Sequence[str]], jobs: int, logs: Path) -> Row:
    """Run the probe and the tests in an environment; what they print goes to files in `logs`."""
    log = logs / f"{environment.name}.log"
    if not environment.run(["-c", PROBE], log):
        return Row(("?", "?", environment.name), (), {"import": "failed"}, [f"import: see {log.with_suffix('.err')}"])
    python, torch, megatron, losses, told = json.loads(log.read_text().splitlines()[-1])
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    tests = [test for part in parts.values() for test in part]
    options = ["-q", "-p", "no:cacheprovider", "-n", str(jobs), "--dist", "loadfile", f"--junitxml={report}"]
    environment.run(["-m", "pytest", *options, *tests], log)
    outcomes = _outcomes(report) if report.is_file() else {}
    cells, failed = {"import": "warned" if told else "ok"}, [*told]
    for part, names in parts.items():
        prefixes = tuple(name.replace(".py", "").replace("/", ".") for name in names)
        of_part = {name: outcome for name, outcome in outcomes.items() if name.startswith(prefixes)}
        wrong = [name for name, outcome in of_part.items() if outcome not in ("passed", "skipped")]
        count = sum(outcome == "passed" for outcome in of_part.values())
        cells[part] = f"{len(wrong)} failed" if wrong else str(count or "none ran")
        failed += wrong if count or wrong else [f"{part}: none ran, see {log}"]
    return Row((python, torch, megatron), tuple(losses), cells, failed)


def sources(folder: Path) -> list[Environment]:
    """This interpreter with each megatron-core, to be read and not run; downloads what is missing."""
    copies = {version: folder / "sources" / version for version in VERSIONS}
    for version, copy in copies.items():
        if not copy.is_dir():
            python = ".".join(map(str, VERSIONS[version]))
            options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--ignore-requires-python"]
            install = [sys.executable, "-m", "pip", "install", "--quiet", *options, "--target", str(copy)]
            subprocess.run([*install, f"megatron-core=={version}"], check=True)
    return [Environment(version, Path(sys.executable), copy) for version, copy in copies.items()]


def misfits(environment: Environment, logs: Path) -> set[str]:
    """Uses of names that the libraries of an environment lack, and calls that they do not take, by mypy."""
    log = logs / f"{environment.name}.types"
    settings = [f"--config-file={ROOT / 'tests' / 'types.ini'}", f"--cache-dir={logs / 'types'}"]
    own = replace(environment, python=Path(sys.executable))
    own.run(["-m", "mypy", *settings, f"--python-executable={environment.python}"], log)
    lines = log.read_text().splitlines()
    if not lines or not lines[-1].startswith(("Found", "Success")):
        raise SystemExit(f"mypy failed: see {log.with_suffix('.err')}")
    return {found[1] for line in lines if (found := MISFIT.fullmatch(line)) and not KNOWN.search(line)}


def _outcomes(report: Path) -> dict[str, str]:
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes[name] = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
    return outcomes


def differing_losses(rows: Sequence[Row]) -> list[str]:
    """Rows whose losses differ from the first row's with the same Python and torch."""
    first = {}
    return [
        f"the losses of {' '.join(row.versions)} differ from those of {' '.join(other.versions)}"
        for row in rows
        if row.losses and (other := first.setdefault(row.versions[:2], row)).losses != row.losses
    ]


def table(rows: Sequence[Row], parts: Mapping[str, Sequence[str]]) -> str:
    """The results as text, a row per environment: how many tests of each part passed."""
    heads = ["Python", "torch", "megatron-core", "import", *parts]
    lines = [heads, *([*row.versions, *(row.cells.get(head, "-") for head in heads[3:])] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def make_environment(folder: Path, torch: str | None):
    """Make an environment of the interpreter that runs this file, with all versions of megatron-core that it takes."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins["torch"] = torch or pins["torch"]
    del pins["megatron-core"]
    home = folder / f"python{sys.version_info[0]}.{sys.version_info[1]}-torch{pins['torch']}"
    venv.create(home, with_pip=True, clear=True)
    constraints = home / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    install = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "-c", str(constraints), "-e", ".[test]"], cwd=ROOT, check=True)
    for version, first in VERSIONS.items():
        if sys.version_info >= first:
            target = ["--no-deps", "--target", str(home / "megatron-core" / version)]
            subprocess.run([*install, *target, f"megatron-core=={version}"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the environments")
    parser.add_argument("--setup", action="store_true", help="make an environment of this interpreter")
    parser.add_argument("--torch", metavar="VERSION", help="torch of the new environment; constraints.txt has another")
    parser.add_argument("--others", action="store_true", help="leave out the environment that runs this")
    parser.add_argument("--all", action="store_true", help="all tests that use megatron-core's modules")
    parser.add_argument("--types", action="store_true", help="no tests; names and calls that only some versions have")
    parser.add_argument("--only", metavar="TEXT", default="", help="environments with this text in the name")
    parser.add_argument("--run", metavar="ARGUMENTS", help="run the interpreters with these arguments, and no tests")
    parser.add_argument("--jobs", type=int, default=2, help="test processes")
    given = parser.parse_args()
    if given.setup:
        make_environment(given.folder, given.torch)
        return 0
    logs = given.folder / "logs"
    if given.types:
        logs.mkdir(parents=True, exist_ok=True)
        own = misfits(Environment("default", Path(sys.executable), None), logs)
        read = [*sources(given.folder), *environments(given.folder, with_own=False)]
        others = [
            f"{each.name}: {text}"
            for each in read
            if given.only in each.name
            for text in sorted(misfits(each, logs) - own)
        ]
        print("\n".join(others) or "every version has the names and takes the calls of the default one")
        return bool(others)
    found = [each for each in environments(given.folder, with_own=not given.others) if given.only in each.name]
    if not found:
        print(f"{given.folder}: no environment to test; make matrix-setup MATRIX_PYTHON=python3.12 makes one")
        return 0
    logs.mkdir(parents=True, exist_ok=True)
    parts, rows = ALL_PARTS if given.all else PARTS, []
    if given.run is not None:
        failures = 0
        for environment in found:
            log = logs / f"{environment.name}.log"
            failures += not environment.run(shlex.split(given.run), log)
            print(f"{environment.name}: {given.run}\n{log.read_text()}", flush=True)
        return failures > 0
    for environment in found:
        print(f"{environment.name} …", file=sys.stderr, flush=True)
        rows.append(examine(environment, parts, given.jobs, logs))
    failed = [*(name for row in rows for name in row.failed), *differing_losses(rows)]
    print(table(rows, parts))
    for row in rows:
        for name in row.failed:
            print(f"{' '.join(row.versions)}: {name}")
    for text in differing_losses(rows):
        print(text)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
