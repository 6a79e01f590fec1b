"""The conformance suite: recycle and an independent interpreter agree on its cases, and on random schedules."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import interpreter, run
from conformance.rules import NOT_MODELLED
from recycle import Schedule, check, lower, simulate
from recycle.ir.event_graph import durations
from recycle.ir.rules import all_rules
from tests.conformance_cases import FAMILY_FILES, FOLDER, case, is_implied, text_of
from tests.ir.random_schedules import break_one_place, random_profile, random_schedule, with_waits

randomly = settings(derandomize=True, max_examples=60, deadline=None, database=None)
seeds = given(st.integers(0, 10**6))


@pytest.mark.parametrize("name", FAMILY_FILES)
def test_recycle_and_the_interpreter_agree_on_every_case(name: str) -> None:
    file = FOLDER / f"{name}.json"
    again = "write it again with: python -m tests.conformance_cases"
    assert file.read_text() == text_of(FAMILY_FILES[name]()), again  # with the verdicts of recycle
    assert list(run.differences(interpreter.check, [file])) == []


def test_every_rule_but_those_of_style_has_a_case() -> None:
    cases = run.read_cases(FOLDER.glob("*.json"))
    found = {rule for each in cases for rule, *_ in each["expect"].get("findings", [])}
    assert found == {rule.code for rule in all_rules()} - NOT_MODELLED


def test_a_case_that_was_changed_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the last instruction that has a micro-batch, which every valid schedule needs."""
    cases: list[dict[str, Any]] = json.loads((FOLDER / "families.json").read_text())
    for each in cases:
        programs = each["programs"]
        worker = max(programs)
        texts = programs[worker].split()
        last = max(n for n, text in enumerate(texts) if "." in text and "RELOAD" not in text)
        programs[worker] = " ".join(texts[:last] + texts[last + 1 :])
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(cases))
    assert run.main([str(file)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(cases)} cases, {len(cases)} differ"


@pytest.mark.process
def test_the_suite_runs_without_recycle(tmp_path: Path) -> None:
    shutil.copytree(FOLDER.parent, tmp_path / "conformance", ignore=shutil.ignore_patterns("recycle*"))
    command = [sys.executable, "-S", "-m", "conformance.run"]  # without installed packages
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split()[-2:] == ["0", "differ"]


@pytest.mark.slow
@randomly
@seeds
def test_makespan_and_period_of_random_schedules_are_those_of_the_interpreter(seed: int) -> None:
    rng = random.Random(seed)
    schedule = lower(random_schedule(rng))
    if rng.random() < 0.3:
        schedule = with_waits(rng, schedule)
    profile, columns = random_profile(rng, schedule), schedule.columns
    timeline, taken = simulate(schedule, profile), durations(schedule, profile)
    bounds = zip(schedule.shape.workers(), columns.offsets, columns.offsets[1:], strict=False)
    seconds = {str(worker): taken[begin:end].tolist() for worker, begin, end in bounds}
    answer = second_opinion(schedule, seconds=seconds)
    assert (answer["makespan"], answer["period"]) == pytest.approx((timeline.makespan, timeline.period))
    assert timeline.period <= timeline.makespan * (1 + 1e-9)


@pytest.mark.slow
@randomly
@seeds
def test_a_random_defect_is_found_by_both(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng, most=3)
    broken = break_one_place(rng, lower(schedule) if rng.random() < 0.7 else schedule)
    if broken is not None:
        errors = [[f.rule, f.worker, f.position, f.instruction] for f in check(broken[0]) if f.severity == "error"]
        found = second_opinion(broken[0], implied=is_implied(broken[0]))["findings"]
        assert found
        assert all(finding in errors for finding in found)


def second_opinion(schedule: Schedule, **options: Any) -> dict[str, Any]:
    return interpreter.check({**run.DEFAULTS, **case("random", schedule, **options)})
