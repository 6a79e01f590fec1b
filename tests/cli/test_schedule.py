"""`recycle schedule`, `check` and `simulate`: files, exit statuses, JSON and text."""

import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from inspect import getdoc
from pathlib import Path

import pytest

from recycle import Link, Profile, Schedule, Shape, lower
from recycle.cli.app import COMMANDS, command_of
from recycle.exec.faults.kinds import KINDS
from recycle.ir.families import FAMILIES, TWO_CHUNKS, interleaved, one_f_one_b, v_min
from tests import CASES

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
def test_options_build_the_schedule_and_it_passes_check(command, options):
    built = BUILT[options]
    outcome = command(f"schedule {options} -o s.json")
    assert (outcome.status, outcome.err) == (0, "")
    family = options.split()[0]
    assert outcome.out == f"s.json: {family}, {built.shape}, {len(built.columns)} instructions\n"
    assert Schedule.load("s.json") == Schedule.loads(command(f"schedule {options}").out) == built
    assert Schedule.load("s.json").metadata["family"] == family
    count = len(Schedule.load("s.json").columns)
    assert command("check s.json").out == f"s.json: valid, {count} instructions\n"
    checked = command("check s.json --strict --json")
    assert (checked.status, checked.json["findings"]) == (0, [])


def test_replays_are_an_option(command):
    for every, count in ((1, 8), (2, 4), (50, 4), ("gaps", 2)):
        assert command(f"schedule 1f1b -D 2 -P 2 -m 2 --replays {every} -o s.json").status == 0
        assert sum("REPLAY" in word for word in Schedule.load("s.json").words()) == count
        assert command("check s.json --strict").status == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_shows_its_examples_whole(command, name):
    outcome = command(f"{name} --help")
    assert outcome.status == 0
    assert len(outcome.out.splitlines()) <= 60
    written = getdoc(command_of(name).callback) or ""
    examples = re.findall(r"^(?:Example: )?(?:\*\*)?((?:srun .*)?recycle .*?)(?:\*\*.*)?$", written, flags=re.MULTILINE)
    assert examples
    shown = " ".join(outcome.out.split())
    assert [example for example in examples if example not in shown] == []


@pytest.mark.parametrize("name", ["train", "agent"])
def test_all_kinds_of_faults_are_listed(command, name):
    listed = command(f"{name} --help-faults")
    assert listed.status == 0
    assert [kind.example for kind in KINDS.values() if kind.example not in listed.out] == []


@pytest.mark.process
def test_the_console_script_and_its_version():
    shown = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "recycle 0.1.0\n", "")
    refused = subprocess.run([SCRIPT, "check", "/nowhere.json"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "recycle: /nowhere.json: cannot be read (No such file or directory) [schedule-error]\n"


def test_json_is_the_file_or_what_was_written(command):
    assert command("schedule 1f1b -P 2 -m 2 --json").json["format"] == "recycle-schedule"
    shape = {"pipelines": 1, "ranks": 2, "micro_batches": 2, "chunks": 1}
    expected = {"file": "s.json", "family": "1f1b", "shape": shape, "instructions": 8}
    assert command("schedule 1f1b -P 2 -m 2 -o s.json --json").json == expected


@pytest.mark.process
def test_on_a_terminal_the_schedule_is_drawn():
    main, shown = pty.openpty()
    subprocess.run([SCRIPT, "schedule", "zb-v", "-P", "2", "-m", "2"], stdout=shown, check=True)
    os.close(shown)
    text = os.read(main, 1 << 16).decode()
    os.close(main)
    assert "  0.0 F0-F1-" in text
    assert "f0-" in text  # the worker's second stage
    assert "makespan 13   period 1" in text


JOB = "[shape]\npipelines = 1\nranks = 2\nmicro_batches = 3\n"


@pytest.fixture(autouse=True)
def files():
    """One that is valid, one with a forward twice, and one with a warning about serialised transports."""
    valid = one_f_one_b(Shape(1, 2, 3))
    valid.save("valid.json")
    Path("broken.json").write_text(valid.dumps().replace("0F0.1", "0F0.0"))
    text = {"0.0": "0F0 0SEND_F0@0.1 0F1 0SEND_F1@0.1 0RECV_B0@0.1 0B0 0RECV_B1@0.1 0B1",
            "0.1": "1RECV_F0@0.0 1F0 1B0 1SEND_B0@0.0 1RECV_F1@0.0 1F1 1B1 1SEND_B1@0.0"}  # fmt: skip
    Schedule.from_text(Shape(1, 2, 2), text).save("unsafe.json")


def test_findings_exit_1_and_carry_every_field(command):
    outcome = command("check broken.json --json")
    assert outcome.status == 1
    duplicate, missing = outcome.json["findings"]
    assert set(duplicate) == {"rule", "severity", "worker", "position", "instruction", "message", "hint"}
    assert (duplicate["rule"], duplicate["severity"]) == ("duplicate", "error")
    assert (duplicate["worker"], duplicate["position"], duplicate["instruction"]) == ("0.0", 1, "0F0.0")
    assert (missing["rule"], missing["instruction"]) == ("missing", "0B0.1")


def test_finding_shows_its_place_in_the_program(command):
    outcome = command("check broken.json")
    assert outcome.status == 1
    assert "error duplicate on worker 0.0, position 1: 0F0.0" in outcome.out
    assert "0.0 | 0F0.0 >0F0.0< 0B0.0 0F0.2" in outcome.out
    assert "2 error(s), 0 warning(s)" in outcome.out


def test_warnings_count_only_when_strict(command):
    assert command("check unsafe.json").status == 0
    outcome = command("check unsafe.json --strict --json")
    assert outcome.status == 1
    assert [(f["rule"], f["severity"]) for f in outcome.json["findings"]] == [("serialised-transport", "warning")]


BYTES = 'activation = "100 B"\nstatic = ["1000 B", "50 B"]\n'


@pytest.mark.parametrize(
    ("memory", "rules"),
    [
        ("limit = 2\n", []),
        ("limit = [1, 1]\n", ["activation-limit"]),
        (f'limit = "1200 B"\n{BYTES}', []),
        (f'limit = "1199 B"\n{BYTES}', ["byte-limit"]),
    ],
)
def test_memory_limits_of_a_job_are_checked(command, memory, rules):
    Path("job.toml").write_text(f"{JOB}[memory]\n{memory}")
    outcome = command("check valid.json --job job.toml --json")
    assert (outcome.status, [finding["rule"] for finding in outcome.json["findings"]]) == (len(rules), rules)


def test_rule_is_explained(command):
    outcome = command("check --explain fifo")
    assert outcome.status == 0
    assert outcome.out.startswith("fifo (")
    printed = command("check --explain fifo --json").json
    assert printed["rule"] == "fifo"
    assert printed["documentation"] in outcome.out


def test_many_findings_are_counted(command):
    text = {"0.0": "0F0 " * 5000 + "0F1 0B0 0B1", "0.1": "1F0 1B0 1F1"}
    Schedule.from_text(Shape(1, 2, 2), text).save("flood.json")
    outcome = command("check flood.json")
    assert outcome.status == 1
    assert (
        "... and 4,970 more findings: 4,969 of duplicate, 1 of missing (--json lists the first 1,000 of each rule)\n"
        in outcome.out
    )
    assert "flood.json: 5,000 error(s), 0 warning(s)" in outcome.out
    printed = command("check flood.json --json").json
    assert printed["more"] == {"duplicate": 3999}
    assert [finding["rule"] for finding in printed["findings"]] == ["duplicate"] * 1000 + ["missing"]
    assert "breaks 5000 rule(s)" in command("simulate flood.json").err


@pytest.fixture(autouse=True)
def timed_file():
    one_f_one_b(Shape(1, 4, 8)).save("1f1b.json")


def test_the_figures_of_1f1b(command):
    outcome = command("simulate 1f1b.json --json")
    figures = outcome.json
    assert (outcome.status, outcome.err) == (0, "")
    assert (figures["makespan"], figures["period"]) == (33, 33)
    assert figures["bubble_ratio"] == pytest.approx(9 / 33)
    assert figures["inner_bubble"] == [9, 6, 3, 0]
    assert figures["peak_activations"] == figures["peak_bytes"] == [4, 3, 2, 1]
    path = figures["critical_path"]
    assert (path[0]["instruction"], path[0]["start"]) == ("0F0.0", 0)
    assert (path[-1]["instruction"], path[-1]["end"]) == ("0B0.7", 33)


@pytest.mark.parametrize(
    ("line", "makespan"),
    [
        ("1f1b.json --times 2,3,1", 66),
        ("1f1b.json --times 0,0,0", 0),
        ("1f1b.json --comm 0.5", 41),
        ("1f1b.json --job job.toml", 41),
        ("1f1b.json --job job.toml --comm 0", 33),
        ("1f1b.json --profile p.json", 66),
        ("1f1b.json --profile slow.json", 76),
        ("1f1b.json --profile slow.json --comm 0", 33),
        ("pairs.json", 9),
        ("pairs.json --overlap 2", 7),
        ("pairs.json --times 2,1,1", 12),
    ],
)
def test_times_overlap_and_comm_are_options(command, line, makespan):
    Schedule.from_text(Shape(1, 1, 3), {"0.0": "0F0 (0F1;0B0) (0F2;0B1) 0B2"}).save("pairs.json")
    Path("job.toml").write_text("[shape]\npipelines = 1\nranks = 4\nmicro_batches = 8\n[times]\nlink = 0.5\n")
    Profile(2.0, 3.0, 1.0).save("p.json")
    Profile(links={"*.1>*.2": Link(8.0)}).save("slow.json")
    assert command(f"simulate {line} --json").json["makespan"] == makespan


def test_gaps_state_what_a_worker_waits_for(command):
    figures = command("simulate 1f1b.json --comm 0.5 --json").json
    assert figures["gaps"][0][0] == {
        "start": 4, "end": 13, "cause": "order", "before": "0B0.0",
        "waits_for": {"worker": "0.1", "instruction": "1B0.0"}, "ready": "0F0.4",
    }  # fmt: skip
    assert figures["gaps"][1][1] == {
        "start": 1, "end": 1.5, "cause": "transfer", "before": "1F0.0",
        "waits_for": {"worker": "0.0", "instruction": "0SEND_F0.0@0.1"}, "ready": None,
    }  # fmt: skip
    assert figures["gaps"][3][-1] == {
        "start": 33.5, "end": 41, "cause": "nothing_left", "before": None, "waits_for": None, "ready": None,
    }  # fmt: skip
    lengths = [sum(gap["end"] - gap["start"] for gap in gaps) for gaps in figures["gaps"]]
    assert lengths == figures["bubble"] == [17] * 4


def test_failed_workers_are_null_in_every_list(command):
    figures = command(f"simulate {CASES}/adaptive_without_1.2.json --json").json
    assert figures["makespan"] == 36
    for name in ("inner_bubble", "peak_activations", "peak_bytes", "bubble", "peak_at", "gaps"):
        assert len(figures[name]) == 12
        assert [n for n, value in enumerate(figures[name]) if value is None] == [6]


def test_slow_link_affects_both_directions_only(command):
    links = {pair: Link(2.0) for pair in ("0.1>0.2", "0.2>0.1")}
    Profile(latency=0.5, links=links).save("p.json")
    slow = command("simulate 1f1b.json --profile p.json --json").json
    assert command("simulate 1f1b.json --comm 0.5 --link 0.1,0.2=4 --json").json == slow
    assert slow["makespan"] > command("simulate 1f1b.json --comm 0.5 --json").json["makespan"] == 41
    Profile(latency=0.125, bandwidth=8.0, message=3.0).save("p.json")  # 0.5 in all
    assert command("simulate 1f1b.json --profile p.json --link 0.2,0.1=4 --json").json["makespan"] == slow["makespan"]


def test_invalid_schedule_is_simulated_with_a_warning(command):
    Path("broken.json").write_text(Path("1f1b.json").read_text().replace(" 0F0.7", ""))
    outcome = command("simulate broken.json --json")
    assert outcome.json["makespan"] > 0
    assert outcome.err == "recycle: broken.json breaks 1 rule(s), see recycle check broken.json\n"
