"""A kind of instruction from one file outside the package, the one printed in docs/guides/add-an-instruction.md."""

import sys
from importlib import import_module

import pytest

from recycle import Profile, RunError, Schedule, ScheduleError, Shape, check, lower, simulate
from recycle.exec import run
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.worker.kinds import RELEASES, RUNS
from recycle.ir.instruction import KIND_CLASSES, Compute, OptimizerStep, StageWide, parse_instruction
from recycle.ir.kinds import InstructionKind, register, unregister
from recycle.ir.rules import KIND_RULES, all_rules
from tests.exec.runs import job
from tests.kinds import forget
from tests.test_docs import blocks
from viz.kinds import LOOKS

FILE, USE = blocks("docs/guides/add-an-instruction.md", "python")
SHAPE = Shape(2, 2, 2)
PROGRAMS = {
    "0.0": "0F0.0 0F0.1 0RERUN1.1 0B0.0 0B0.1",
    "0.1": "1F0.0 1B0.0 1F0.1 1B0.1",
    "1.0": "0F1.0 0F1.1 0B1.0 0B1.1",
    "1.1": "1F1.0 1B1.0 1F1.1 1B1.1",
}


@pytest.fixture
def rerun(tmp_path, monkeypatch):
    """The file of the page, imported; its kind is unregistered after the test."""
    (tmp_path / "rerun.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = import_module("rerun")
    yield module
    forget(module.Rerun)
    del sys.modules["rerun"]


def plain(**programs: str) -> Schedule:
    """The schedule without RERUN, with these programs replaced."""
    return Schedule.from_text(SHAPE, PROGRAMS | {"0.0": "0F0.0 0F0.1 0B0.0 0B0.1"} | programs)


@pytest.fixture
def schedule(rerun):
    return Schedule.from_text(SHAPE, PROGRAMS)


def test_the_code_of_the_page_runs(rerun, capsys):
    exec(compile(USE, "use.py", "exec"), {})
    printed = capsys.readouterr().out
    assert "0RERUN1.1" in printed
    assert "1RECV_F1.1@1.0 0RERUN1.1" in printed
    assert "C1'" in printed


def test_it_is_written_read_lowered_and_timed(rerun, schedule):
    assert rerun.Rerun.kind == len(KIND_CLASSES) - 1
    assert isinstance(parse_instruction("0RERUN1.1"), rerun.Rerun)
    schedule.save("checked.json")
    assert Schedule.load("checked.json") == schedule
    assert schedule.text() == PROGRAMS
    assert check(lower(schedule), about_to_run=True) == []
    timeline, without = (simulate(each, Profile.uniform(2, 1, 1)) for each in (schedule, plain()))
    assert [busy - bare for busy, bare in zip(timeline.busy, without.busy, strict=True)] == [2, 0, 0, 0]
    assert (timeline.peak_activations, without.peak_activations) == ([3, 1, 2, 1], [2, 1, 2, 1])


@pytest.mark.parametrize(
    ("worker", "program", "message"),
    [
        ("1.0", "0F1.0 0F1.1 0RERUN1.1 0B1.0 0B1.1", "this worker ran the forward itself"),
        ("0.1", "1F0.0 1B0.0 1RERUN1.1 1F0.1 1B0.1", "the last stage hands no output on"),
    ],
)
def test_its_own_rule_is_checked(rerun, worker, program, message):
    (finding,) = check(plain(**{worker: program}))
    assert (finding.rule, finding.worker, finding.position, finding.message) == ("rerun", worker, 2, message)


def test_it_runs_on_real_stages_and_finds_a_wrong_output(rerun, schedule, monkeypatch):
    gpt = job(2, 2, 2, kind="gpt")
    with_rerun, without = run(schedule, gpt, steps=2), run(plain(), gpt, steps=2)
    assert with_rerun.losses == without.losses
    assert with_rerun.digests == without.digests
    forward = MegatronStage.forward

    def wrong(stage, *inputs):
        output = forward(stage, *inputs)
        return None if output is None else output * (1 + 2**-20)

    monkeypatch.setattr(MegatronStage, "forward", wrong)
    with pytest.raises(RunError, match=r"0RERUN1\.1: the output differs"):
        run(schedule, gpt, steps=2)


def test_a_stage_wide_kind_follows_the_one_that_it_names():
    row = InstructionKind(token="GATHER", title="gather", follows=OptimizerStep, seconds=("reduce",))
    gather = register(row)(type("Gather", (StageWide,), {"__slots__": ()}))
    try:
        shape, work = Shape(1, 1, 1), "0F0.0 0B0.0 0REDUCE_GRAD"
        valid = Schedule.from_text(shape, {"0.0": f"{work} 0STEP 0GATHER"})
        assert check(valid) == []
        assert simulate(valid, Profile(step=3.0, reduce=2.0)).period == 10
        (finding,) = check(Schedule.from_text(shape, {"0.0": f"{work} 0GATHER 0STEP"}))
        assert (finding.rule, finding.instruction) == ("order", "0GATHER")
    finally:
        unregister(gather)


def test_a_token_that_is_taken_or_malformed_is_refused():
    before = list(KIND_CLASSES)
    for token, message in (("F", "already used by Forward"), ("rerun", "is not a token"), ("R2", "is not a token")):
        with pytest.raises(ValueError, match=message):
            register(InstructionKind(token=token, title=""))(type("Own", (Compute,), {"__slots__": ()}))
    with pytest.raises(ScheduleError, match="not an instruction"):
        parse_instruction("0RERUN1.1")
    with pytest.raises(ValueError, match="not the kind that was registered last"):
        unregister(KIND_CLASSES[0])
    assert before == KIND_CLASSES


def test_executor_checker_and_viewer_know_every_kind():
    kinds = set(KIND_CLASSES)
    assert set(RUNS) == set(LOOKS) == kinds
    assert set(RELEASES) == {cls for cls in kinds if cls.row.released_by is not None}
    assert set(KIND_RULES) <= kinds
    assert {rule for rules in KIND_RULES.values() for rule in rules} <= set(all_rules())
