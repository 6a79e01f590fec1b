"""The conformance suite: recycle and an independent interpreter agree on its cases, and on random schedules."""

import json
import random
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from conformance import interpreter, run
from conformance.rules import NOT_MODELLED
from recycle import Profile, Schedule, Shape, check, lower, simulate
from recycle.ir.rules import all_rules
from tests.conformance_cases import FAMILY_FILES, FOLDER, UNIT, described, is_implied, text_of
from tests.ir.random_schedules import break_one_place, random_profile, random_schedule, with_waits

randomly = settings(max_examples=60)
seeds = given(st.integers(0, 10**6))


@pytest.mark.parametrize("name", FAMILY_FILES)
def test_recycle_and_the_interpreter_agree_on_every_case(name):
    file = FOLDER / f"{name}.json"
    again = "write it again with: python -m tests.conformance_cases"
    assert file.read_text() == text_of(FAMILY_FILES[name]()), again  # with the verdicts of recycle
    assert list(run.differences(interpreter.check, [file])) == []


def test_every_rule_but_those_of_style_has_a_case():
    cases = run.read_cases(FOLDER.glob("*.json"))
    found = {rule for each in cases for rule, *_ in each["expect"].get("findings", [])}
    assert found == {rule.code for rule in all_rules()} - NOT_MODELLED


def test_a_case_that_was_changed_differs(tmp_path, capsys):
    """Each without its last F, B, I or W."""
    cases = json.loads((FOLDER / "families.json").read_text())
    for each in cases:
        programs = each["programs"]
        worker = max(programs)
        texts = programs[worker].split()
        last = max(n for n, text in enumerate(texts) if re.match(r"\(?\d+[FBIW]\d", text))
        programs[worker] = " ".join(texts[:last] + texts[last + 1 :])
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(cases))
    assert run.main([str(file)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(cases)} cases, {len(cases)} differ"


@pytest.mark.parametrize(
    ("text", "error"), [(None, "No such file"), ("[1", "Expecting"), ('[{"name": 1}]', "case 0 needs the keys expect")]
)
def test_bad_files_are_refused(tmp_path, capsys, text, error):
    file = tmp_path / "bad.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        run.main([str(file)])
    assert f"error: {file}: " in (message := capsys.readouterr().err)
    assert error in message


@pytest.mark.process
def test_the_suite_runs_without_recycle(tmp_path):
    shutil.copytree(FOLDER.parent, tmp_path / "conformance", ignore=shutil.ignore_patterns("recycle*"))
    command = [sys.executable, "-S", "-m", "conformance.run"]  # without installed packages
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split()[-2:] == ["0", "differ"]


@pytest.mark.process
def test_simgrid_has_the_times_of_the_cases(tmp_path):
    """Also with a channel per worker; not with the times of another schedule."""
    python = "/usr/bin/python3"  # Debian's, for which SimGrid is packaged
    if not Path(python).exists() or subprocess.run([python, "-c", "import simgrid"], capture_output=True).returncode:
        pytest.skip("SimGrid is not installed (Debian's python3-simgrid)")
    cases = [case for name in ("torch", "failures") for case in json.loads((FOLDER / f"{name}.json").read_text())[:6]]
    (tmp_path / "whole.json").write_text(json.dumps(cases))
    cases[0]["expect"]["period"] *= 1.02
    (tmp_path / "changed.json").write_text(json.dumps(cases[:1]))
    command = [python, "-m", "conformance.simgrid_model"]
    for name, code, ends in (
        ("whole", 0, "12 of 12 cases compared, 0 differ"),
        ("changed", 1, "1 of 1 cases compared, 1 differ"),
    ):
        files = [str(tmp_path / f"{name}.json")]
        done = subprocess.run(command + files, cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout.splitlines()[-1].startswith(ends)) == (code, True), done


@pytest.mark.slow
@randomly
@seeds
def test_makespan_and_period_of_random_schedules_are_those_of_the_interpreter(seed):
    rng = random.Random(seed)
    schedule = lower(random_schedule(rng))
    if rng.random() < 0.3:
        schedule = with_waits(rng, schedule)
    profile = random_profile(rng, schedule)
    times = {"F": profile.forward, "I": profile.backward_input, "W": profile.backward_weight, "step": profile.step}
    times |= {"reduce": profile.reduce, "speed": profile.speed, "transfer": transfer_seconds(profile, schedule.shape)}
    if profile.overlapped_pair is not None:
        times["pair"] = profile.overlapped_pair
    answer, timeline = second_opinion(schedule, times), simulate(schedule, profile)
    assert (answer["makespan"], answer["period"]) == pytest.approx((timeline.makespan, timeline.period))


def transfer_seconds(profile: Profile, shape: Shape) -> dict[str, list[float]]:
    """Seconds of each directed pair of workers across each boundary of stages."""
    stages, workers = shape.stages, [*enumerate(shape.workers())]
    return {
        f"{a}>{b}": profile.transfer_seconds(shape, [i] * stages, [j] * stages, range(stages)).tolist()
        for (i, a), (j, b) in product(workers, workers)
    }


@pytest.mark.slow
@randomly
@seeds
def test_a_random_defect_is_found_by_both_near_its_place(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng, most=3)
    broken = break_one_place(rng, lower(schedule) if rng.random() < 0.7 else schedule)
    if broken is None:
        return
    wrong, near = broken
    findings, second = check(wrong), second_opinion(wrong, implied=is_implied(wrong))["findings"]
    errors = [[f.rule, f.worker, f.position, f.instruction] for f in findings if f.severity == "error"]
    assert second
    assert all(finding in errors for finding in second)  # the interpreter stops after a group of rules
    assert {finding.worker for finding in findings} & ({str(worker) for worker in near} | {None}), findings


def second_opinion(schedule: Schedule, times=UNIT, **options):
    return interpreter.check({**run.DEFAULTS, **described(schedule, times, **options)})
