"""`recycle check`: exit status, one JSON object, located findings for people, and what it refuses."""

from pathlib import Path

import pytest

from recycle import Profile, Schedule, Shape, lower
from recycle.ir.families import one_f_one_b
from recycle.ir.rules import all_rules
from tests.cli.command import Command

JOB = "[shape]\npipelines = 1\nranks = 2\nmicro_batches = 3\n"


@pytest.fixture(autouse=True)
def files() -> None:
    """One that is valid, one with a forward twice, and one with a warning about serialised transports."""
    valid = one_f_one_b(Shape(1, 2, 3))
    valid.save("valid.json")
    Path("broken.json").write_text(valid.dumps().replace("0F0.1", "0F0.0"))
    text = {"0.0": "0F0 0SEND_F0@0.1 0F1 0SEND_F1@0.1 0RECV_B0@0.1 0B0 0RECV_B1@0.1 0B1",
            "0.1": "1RECV_F0@0.0 1F0 1B0 1SEND_B0@0.0 1RECV_F1@0.0 1F1 1B1 1SEND_B1@0.0"}  # fmt: skip
    Schedule.from_text(Shape(1, 2, 2), text).save("unsafe.json")


def test_a_valid_file_exits_0(command: Command) -> None:
    outcome = command("check valid.json")
    assert (outcome.status, outcome.out, outcome.err) == (0, "valid.json: valid, 12 instructions\n", "")
    outcome = command("check valid.json --json")
    assert (outcome.status, outcome.json["findings"]) == (0, [])


def test_findings_exit_1_and_carry_every_field(command: Command) -> None:
    outcome = command("check broken.json --json")
    assert outcome.status == 1
    duplicate, missing = outcome.json["findings"]
    assert set(duplicate) == {"rule", "severity", "worker", "position", "instruction", "message", "hint"}
    assert (duplicate["rule"], duplicate["severity"]) == ("duplicate", "error")
    assert (duplicate["worker"], duplicate["position"], duplicate["instruction"]) == ("0.0", 1, "0F0.0")
    assert (missing["rule"], missing["instruction"]) == ("missing", "0B0.1")


def test_people_see_the_place_in_the_program(command: Command) -> None:
    outcome = command("check broken.json")
    assert outcome.status == 1
    assert "error duplicate on worker 0.0, position 1: 0F0.0" in outcome.out
    assert "0.0 | 0F0.0 >0F0.0< 0B0.0 0F0.2" in outcome.out
    assert "2 error(s), 0 warning(s)" in outcome.out


def test_warnings_count_only_when_strict(command: Command) -> None:
    assert command("check unsafe.json").status == 0
    outcome = command("check unsafe.json --strict --json")
    assert outcome.status == 1
    assert [(f["rule"], f["severity"]) for f in outcome.json["findings"]] == [("serialised-transport", "warning")]


def test_a_flood_of_findings_is_cut_for_people_only(command: Command) -> None:
    text = {w: p + " " + p for w, p in one_f_one_b(Shape(2, 2, 6)).text().items()}
    Schedule.from_text(Shape(2, 2, 6), text).save("twice.json")
    outcome = command("check twice.json")
    assert outcome.out.count("error duplicate") == 30
    assert "... and 18 more findings: 18 of duplicate (--json prints them all)" in outcome.out
    assert len(command("check twice.json --json").json["findings"]) == 48


def test_the_limits_of_a_job_count(command: Command) -> None:
    Path("job.toml").write_text(JOB + "[memory]\nlimit = 2\n")
    assert command("check valid.json --job job.toml").status == 0
    Path("job.toml").write_text(JOB + "[memory]\nlimit = [1, 1]\n")
    outcome = command("check valid.json --job job.toml --json")
    assert outcome.status == 1
    assert [(f["rule"], f["worker"], f["position"]) for f in outcome.json["findings"]] == [
        ("activation-limit", "0.0", 1)]  # fmt: skip


def test_a_limit_in_bytes_counts_static_bytes_too(command: Command) -> None:
    Profile(activation=100.0, static=[1000.0, 50.0]).save("profile.json")
    Path("job.toml").write_text(JOB + '[times]\nprofile = "profile.json"\n[memory]\nlimit = "1200 B"\n')
    assert command("check valid.json --job job.toml").status == 0
    Path("job.toml").write_text(JOB + '[times]\nprofile = "profile.json"\n[memory]\nlimit = "1199 B"\n')
    outcome = command("check valid.json --job job.toml --json")
    assert [(f["rule"], f["instruction"]) for f in outcome.json["findings"]] == [("byte-limit", "0F0.1")]


def test_bytes_written_in_the_job_count_as_those_of_a_profile(command: Command) -> None:
    bytes_of_stages = 'activation = "100 B"\nstatic = ["1000 B", "50 B"]\n'
    for limit, status, rules in (("1200 B", 0, []), ("1199 B", 1, ["byte-limit"])):
        Path("job.toml").write_text(JOB + f'[memory]\nlimit = "{limit}"\n{bytes_of_stages}')
        outcome = command("check valid.json --job job.toml --json")
        assert (outcome.status, [finding["rule"] for finding in outcome.json["findings"]]) == (status, rules)
    assert max(command("simulate valid.json --job job.toml --json").json["peak_bytes"]) == 1200


@pytest.mark.parametrize("code", [rule.code for rule in all_rules()])
def test_every_rule_is_explained(command: Command, code: str) -> None:
    outcome = command(f"check --explain {code}")
    assert outcome.status == 0
    assert outcome.out.startswith(f"{code} (")
    told = command(f"check --explain {code} --json").json
    assert told["rule"] == code
    assert told["documentation"] in outcome.out


def test_a_lowered_file_of_a_family_passes_strictly(command: Command) -> None:
    lower(one_f_one_b(Shape(3, 4, 6))).save("l.json")
    assert command("check l.json --strict").status == 0


def test_a_flood_of_findings_is_listed_in_part_and_counted(command: Command) -> None:
    text = {"0.0": "0F0 " * 5000 + "0F1 0B0 0B1", "0.1": "1F0 1B0 1F1"}
    Schedule.from_text(Shape(1, 2, 2), text).save("flood.json")
    outcome = command("check flood.json")
    assert outcome.status == 1
    assert (
        "... and 4,970 more findings: 4,969 of duplicate, 1 of missing (--json lists the first 1,000 of each rule)\n"
        in outcome.out
    )
    assert "flood.json: 5,000 error(s), 0 warning(s)" in outcome.out
    found = command("check flood.json --json").json
    assert found["more"] == {"duplicate": 3999}
    assert [finding["rule"] for finding in found["findings"]] == ["duplicate"] * 1000 + ["missing"]
    assert "breaks 5000 rule(s)" in command("simulate flood.json").err
