import json
from pathlib import Path

import pytest

JOB = """
[shape]
pipelines = 3
ranks = 2
micro_batches = 2
[memory]
limit = 3
[planner]
steps = 1000
"""


@pytest.fixture
def planned(command):
    Path("job.toml").write_text(JOB)
    assert command("plan job.toml --failed 1.1 -o plan.json").status == 0


def test_bound_of_a_plan_is_proven_again(planned, command):
    proven = command("verify plan.json --job job.toml --json").json
    assert (proven["proven"], proven["bound"], proven["period"], proven["gap"]) == (True, 9, 9, 0)
    assert proven["rules"] == ["load"]
    assert {"plan.json:", "9;", "9,", "0.0%"} <= set(command("verify plan.json").out.split())


def test_plan_that_proves_too_little_has_status_1(planned, command):
    plan = json.loads(Path("plan.json").read_text())
    plan["metadata"]["certificate"]["bound"] = 10.0
    Path("wrong.json").write_text(json.dumps(plan))
    verdict = command("verify wrong.json --json")
    assert (verdict.status, verdict.json["proven"], verdict.json["bound"]) == (1, False, None)
    assert command("verify wrong.json").out.startswith("wrong.json: not proven: ")
    Path("job.toml").write_text(JOB.replace("limit = 3", "limit = 4"))
    assert command("verify plan.json --job job.toml").status == 1
    assert command("plan job.toml --failed 0.1,1.1 --layout elastic -o elastic.json").status == 0
    assert "--layout fixed" in command("verify elastic.json --job job.toml --json").json["reason"]


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_plan_on_either_placement_is_one_of_a_job_with_both(command, placement):
    text = JOB.replace("ranks = 2", 'ranks = 2\nchunks = 2\nplacement = "PLACEMENT"')
    for name in (placement, "auto"):
        Path(f"{name}.toml").write_text(text.replace("PLACEMENT", name))
    assert command(f"plan {placement}.toml -o plan.json").status == 0
    assert command("verify plan.json --job auto.toml").status == 0


def test_library_is_proven_plan_by_plan(planned, command):
    assert command("plan job.toml --failures 1 --library plans").status == 0
    Path("plans/mine.profile.json").write_text('{"forward": 2}')  # not listed
    verdict = command("verify plans --json").json
    assert verdict["proven"]
    assert sorted(plan["bound"] for plan in verdict["plans"]) == [7, 9, 9]
    wrong = next(Path("plans").glob("[0-9a-f]*.json"))
    wrong.write_text(wrong.read_text().replace('"window": ', '"window": 1'))
    verdict = command("verify plans --json")
    assert (verdict.status, [plan["proven"] for plan in verdict.json["plans"]].count(False)) == (1, 1)


@pytest.mark.parametrize("argument", ["job.toml", "1f1b.json", "empty", "missing.json", "broken.json"])
def test_what_is_no_plan_has_status_2(planned, command, argument):
    assert command("schedule 1f1b -P 2 -m 2 -o 1f1b.json").status == 0
    Path("empty").mkdir()
    plan = json.loads(Path("plan.json").read_text())
    plan["metadata"]["certificate"]["rows"] = {"load": 1}
    Path("broken.json").write_text(json.dumps(plan))
    assert command(f"verify {argument}").refused(argument)
