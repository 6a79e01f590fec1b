"""`recycle schedule`."""

import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from inspect import getdoc
from pathlib import Path

import pytest

from recycle import Schedule, Shape, lower
from recycle.cli.app import COMMANDS, command_of
from recycle.exec.faults.kinds import KINDS
from recycle.ir.families import FAMILIES, TWO_CHUNKS, interleaved, one_f_one_b, v_min
from tests.cli.command import Command
from tests.ir.families.chunks import ANY, chunks_of

SCRIPT = Path(sys.executable).parent / "recycle"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_written_as_built(command: Command, tmp_path: Path, family: str) -> None:
    file = tmp_path / "s.json"
    shape = Shape(2, 4, 8, chunks_of(family))
    built = FAMILIES[family](shape)
    outcome = command("schedule", family, "-D", 2, "-P", 4, "-m", 8, "-V", shape.chunks, "-o", file)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == f"{file}: {family}, {shape}, {len(built.columns)} instructions\n"
    assert Schedule.load(file) == built
    assert Schedule.load(file).metadata["family"] == family


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_printed_passes_the_checker(command: Command, tmp_path: Path, family: str) -> None:
    printed = command("schedule", family, "-P", 2, "-m", 4, "-V", chunks_of(family), "--lower")
    assert (printed.status, printed.err) == (0, "")
    file = tmp_path / "s.json"
    file.write_text(printed.out)
    checked = command("check", file, "--strict", "--json")
    assert (checked.status, checked.json["findings"]) == (0, [])


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - ANY))
def test_a_wrong_number_of_chunks_is_refused(command: Command, family: str) -> None:
    needed = chunks_of(family)
    assert command("schedule", family, "-P", 2, "-m", 4, "-V", 3 - needed).refused(f"{family}: needs chunks = {needed}")
    assert command("schedule", family, "-P", 2, "-m", 4, "-V", 3).refused(f"{family}: needs chunks = {needed}", "got 3")


def test_a_group_size_is_an_option_of_interleaved_alone(command: Command) -> None:
    arguments = ("-P", 2, "-m", 5, "-V", 2)
    outcome = command("schedule", "interleaved", *arguments, "--group-size", 3)
    assert Schedule.loads(outcome.out) == interleaved(Shape(1, 2, 5, 2), group_size=3)
    assert command("schedule", "interleaved", *arguments).refused("divisible by ranks = 2 or a group_size, got 5")
    assert command("schedule", "interleaved", *arguments, "--group-size", 4).refused("group_size must be", "got 4")
    for family in FAMILIES.keys() - {"interleaved"}:
        refused = command("schedule", family, *arguments, "--group-size", 3)
        assert refused.refused(f"--group-size: {family} takes none, it is for interleaved")


def test_replays_are_an_option(command: Command, tmp_path: Path) -> None:
    arguments = ("1f1b", "-D", 2, "-P", 2, "-m", 2)
    file = tmp_path / "s.json"
    for every, count in ((1, 8), (2, 4), (50, 4), ("gaps", 2)):
        assert command("schedule", *arguments, "--replays", every, "-o", file).status == 0
        assert sum("REPLAY" in word for word in Schedule.load(file).words()) == count
        assert command("check", file, "--strict").status == 0
    for refused in ("0", "-1", "gap", "1.5", "9999999"):
        outcome = command("schedule", *arguments, f"--replays={refused}")
        assert outcome.refused(f"--replays: '{refused}' is neither gaps nor a number of iterations up to 1000000")
    assert command("schedule", "1f1b", "-P", 2, "-m", 2, "--replays", 3).refused("no worker has a peer; give -D 2")
    assert command("schedule", *arguments, "--replays", 3, "--forward-only").refused("there is no backward to replay")


def test_buckets_are_an_option(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    arguments = ("-D", 2, "-P", 2, "-m", 3, "--buckets", 4)
    assert command("schedule", "1f1b", *arguments, "-o", file).status == 0
    assert Schedule.load(file) == replace(one_f_one_b(Shape(2, 2, 3)), buckets=4)
    printed = command("schedule", "1f1b", *arguments, "--lower")
    assert Schedule.loads(printed.out) == lower(Schedule.load(file))
    assert command("simulate", file, "--json").json["makespan"] == 11  # the last I's hand on before their W's
    assert command("schedule", "1f1b", "-P", 2, "-m", 3, "--buckets", 0).status == 2
    assert command("schedule", "1f1b", "-P", 2, "-m", 3, "--buckets", 65).status == 2


def test_gathers_are_an_option(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    assert command("schedule", "1f1b", "-D", 2, "-P", 2, "-m", 3, "--gather", "-o", file).status == 0
    assert Schedule.load(file) == replace(one_f_one_b(Shape(2, 2, 3)), gathers=True)
    assert lower(Schedule.load(file)).text()["1.1"].endswith("1STEP 1GATHER_PARAMS")
    assert command("check", file).status == 0


def test_lower_and_barrier_are_options(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    command("schedule", "1f1b", "-P", 2, "-m", 2, "--lower", "--optimizer", "barrier", "-o", file)
    assert Schedule.load(file) == lower(one_f_one_b(Shape(1, 2, 2), "barrier"))


def test_without_a_file_the_schedule_itself_is_printed(command: Command) -> None:
    outcome = command("schedule", "1f1b", "-P", 2, "-m", 2)
    assert Schedule.loads(outcome.out) == one_f_one_b(Shape(1, 2, 2))


def test_bad_input_is_refused_in_one_line_and_writes_nothing(command: Command, tmp_path: Path) -> None:
    known = ", ".join(FAMILIES)
    assert command("schedule", "zigzag", "-P", 4, "-m", 6).refused("'zigzag' is not a family", known)
    assert command("schedule", "1f1b", "-P", 0, "-m", 6).refused("ranks must be a whole number of at least 1")
    assert command("schedule", "1f1b", "-P", 4, "-m", 6, "-V", 2).refused("1f1b: needs chunks = 1")
    assert command("schedule", "1f1b", "-D", 10**9, "-P", 4, "-m", 6).refused("too large")
    assert command("schedule", "1f1b", "-P", 2, "-m", 2, "-o", tmp_path / "s.xml").refused("'.xml'", "native")
    assert command("schedule", "1f1b", "-P", 2, "-m", 2, "-o", tmp_path / "no" / "s.json").refused("cannot be written")
    assert list(tmp_path.iterdir()) == []


def test_usage_errors_exit_2(command: Command) -> None:
    for arguments in (["schedule"], ["schedule", "1f1b", "-P", "x", "-m", "1"], ["schedule", "1f1b", "-P", "2"],
                      ["schedule", "1f1b", "-P", "2", "-m", "2", "--optimizer", "never"], ["nonsense"]):  # fmt: skip
        outcome = command(*arguments)
        assert (outcome.status, outcome.out) == (2, "")
        assert "Traceback" not in outcome.err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_shows_its_examples_whole(command: Command, name: str) -> None:
    outcome = command(name, "--help")
    assert outcome.status == 0
    assert len(outcome.out.splitlines()) <= 60
    written = getdoc(command_of(name).callback) or ""
    examples = re.findall(r"^(?:Example: )?(?:\*\*)?((?:srun .*)?recycle .*?)(?:\*\*.*)?$", written, flags=re.MULTILINE)
    assert examples
    shown = " ".join(outcome.out.split())
    assert [example for example in examples if example not in shown] == []


@pytest.mark.parametrize("name", ["train", "agent"])
def test_all_kinds_of_faults_are_listed(command: Command, name: str) -> None:
    listed = command(name, "--help-faults")
    assert listed.status == 0
    assert [kind.example for kind in KINDS.values() if kind.example not in listed.out] == []


@pytest.mark.process
def test_the_console_script_and_its_version() -> None:
    shown = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "recycle 0.1.0\n", "")
    refused = subprocess.run([SCRIPT, "check", "/nowhere.json"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "recycle: /nowhere.json: cannot be read (No such file or directory)\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_without_v_a_family_gets_the_chunks_it_takes(command: Command, family: str) -> None:
    outcome = command("schedule", family, "-P", 2, "-m", 4)
    assert Schedule.loads(outcome.out).shape.chunks == (2 if family in TWO_CHUNKS else 1)


def test_times_are_what_an_order_is_made_for(command: Command) -> None:
    outcome = command("schedule", "v-min", "-P", 4, "-m", 8, "--times", "2,3,1")
    assert Schedule.loads(outcome.out) == v_min(Shape(1, 4, 8, 2), times=(2, 3, 1))
    assert Schedule.loads(outcome.out) != v_min(Shape(1, 4, 8, 2))
    assert command("schedule", "gpipe", "-P", 4, "-m", 8, "--times", "2,3,1").refused(
        "--times: gpipe takes none, it is for zb-v, v-half, v-min"
    )
    assert command("schedule", "v-min", "-P", 4, "-m", 8, "--times", "2,x").refused("--times '2,x': write F,I,W")


def test_json_is_the_file_or_what_was_written(command: Command, tmp_path: Path) -> None:
    assert command("schedule", "1f1b", "-P", 2, "-m", 2, "--json").json["format"] == "recycle-schedule"
    file = tmp_path / "s.json"
    outcome = command("schedule", "1f1b", "-P", 2, "-m", 2, "-o", file, "--json")
    shape = {"pipelines": 1, "ranks": 2, "micro_batches": 2, "chunks": 1}
    assert outcome.json == {"file": str(file), "family": "1f1b", "shape": shape, "instructions": 8}


@pytest.mark.process
def test_on_a_terminal_the_schedule_is_drawn() -> None:
    main, shown = pty.openpty()
    subprocess.run([SCRIPT, "schedule", "zb-v", "-P", "2", "-m", "2"], stdout=shown, check=True)
    os.close(shown)
    text = os.read(main, 1 << 16).decode()
    os.close(main)
    assert "  0.0 F0-F1-" in text
    assert "f0-" in text  # the worker's second stage
    assert "makespan 13   period 1" in text
