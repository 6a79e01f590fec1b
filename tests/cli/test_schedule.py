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
from tests.ir.families import chunks_of

SCRIPT = Path(sys.executable).parent / "recycle"


GATHERING = replace(one_f_one_b(Shape(2, 2, 3)), gathers=True)
BUCKETS = replace(one_f_one_b(Shape(2, 2, 3)), buckets=4)
BUILT = {
    **{f"{family} -D 2 -P 4 -m 8": FAMILIES[family](Shape(2, 4, 8, 1 + (family in TWO_CHUNKS))) for family in FAMILIES},
    "interleaved -P 2 -m 5 -V 2 --group-size 3": interleaved(Shape(1, 2, 5, 2), group_size=3),
    "v-min -P 4 -m 8 --times 2,3,1": v_min(Shape(1, 4, 8, 2), times=(2, 3, 1)),
    "1f1b -D 2 -P 2 -m 3 --buckets 4": BUCKETS,
    "1f1b -D 2 -P 2 -m 3 --buckets 4 --lower": lower(BUCKETS),
    "1f1b -D 2 -P 2 -m 3 --gather": GATHERING,
    "1f1b -P 2 -m 2 --lower --optimizer barrier": lower(one_f_one_b(Shape(1, 2, 2), "barrier")),
}
"""Options -> what they build."""


@pytest.mark.parametrize("options", BUILT)
def test_what_is_written_and_what_is_printed_is_what_options_say_and_passes_the_checker(
    command: Command, options: str
) -> None:
    built = BUILT[options]
    outcome = command(f"schedule {options} -o s.json")
    assert (outcome.status, outcome.err) == (0, "")
    family = options.split()[0]
    assert outcome.out == f"s.json: {family}, {built.shape}, {len(built.columns)} instructions\n"
    assert Schedule.load("s.json") == Schedule.loads(command(f"schedule {options}").out) == built
    assert Schedule.load("s.json").metadata["family"] == family
    checked = command("check s.json --strict --json")
    assert (checked.status, checked.json["findings"]) == (0, [])


def test_times_and_buckets_make_another_order(command: Command) -> None:
    assert v_min(Shape(1, 4, 8, 2), times=(2, 3, 1)) != v_min(Shape(1, 4, 8, 2))
    assert lower(GATHERING).text()["1.1"].endswith("1STEP 1GATHER_PARAMS")
    BUCKETS.save("s.json")
    assert command("simulate s.json --json").json["makespan"] == 11  # the last I's hand on before their W's


@pytest.mark.parametrize("family", FAMILIES)
def test_lowered_families_pass_the_checker(command: Command, family: str) -> None:
    assert command(f"schedule {family} -P 2 -m 4 -V {chunks_of(family)} --lower -o s.json").status == 0
    checked = command("check s.json --strict --json")
    assert (checked.status, checked.json["findings"]) == (0, [])


def test_replays_are_an_option(command: Command) -> None:
    for every, count in ((1, 8), (2, 4), (50, 4), ("gaps", 2)):
        assert command(f"schedule 1f1b -D 2 -P 2 -m 2 --replays {every} -o s.json").status == 0
        assert sum("REPLAY" in word for word in Schedule.load("s.json").words()) == count
        assert command("check s.json --strict").status == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_shows_its_examples_whole(command: Command, name: str) -> None:
    outcome = command(f"{name} --help")
    assert outcome.status == 0
    assert len(outcome.out.splitlines()) <= 60
    written = getdoc(command_of(name).callback) or ""
    examples = re.findall(r"^(?:Example: )?(?:\*\*)?((?:srun .*)?recycle .*?)(?:\*\*.*)?$", written, flags=re.MULTILINE)
    assert examples
    shown = " ".join(outcome.out.split())
    assert [example for example in examples if example not in shown] == []


@pytest.mark.parametrize("name", ["train", "agent"])
def test_all_kinds_of_faults_are_listed(command: Command, name: str) -> None:
    listed = command(f"{name} --help-faults")
    assert listed.status == 0
    assert [kind.example for kind in KINDS.values() if kind.example not in listed.out] == []


@pytest.mark.process
def test_the_console_script_and_its_version() -> None:
    shown = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "recycle 0.1.0\n", "")
    refused = subprocess.run([SCRIPT, "check", "/nowhere.json"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "recycle: /nowhere.json: cannot be read (No such file or directory)\n"


def test_json_is_the_file_or_what_was_written(command: Command) -> None:
    assert command("schedule 1f1b -P 2 -m 2 --json").json["format"] == "recycle-schedule"
    shape = {"pipelines": 1, "ranks": 2, "micro_batches": 2, "chunks": 1}
    told = {"file": "s.json", "family": "1f1b", "shape": shape, "instructions": 8}
    assert command("schedule 1f1b -P 2 -m 2 -o s.json --json").json == told


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
