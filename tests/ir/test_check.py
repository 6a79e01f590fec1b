"""The checker: each rule finds its defects once, at their place, and valid schedules have no findings."""

import contextlib
import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recycle import (
    Finding,
    JobError,
    MicroBatch,
    Profile,
    Schedule,
    ScheduleError,
    Shape,
    Worker,
    check,
    lower,
    simulate,
)
from recycle.ir.check import explain
from recycle.ir.families import gpipe, interleaved, one_f_one_b
from recycle.ir.instruction import KIND_CLASSES, Backward, Forward, OverlappedPair, make_instruction
from recycle.ir.rules import all_rules
from recycle.ir.rules.reference import reference_page
from recycle.ir.simulate import timeline_of
from tests import DOCS
from tests.ir.random_schedules import random_schedule

bounded = settings(max_examples=40)
randoms = st.randoms(use_true_random=False)


def two_ranks(first: str, second: str, micro_batches=2, **arguments) -> Schedule:
    """Two rows as in a torch CSV; the other rank is the peer of every transfer."""
    rows = {}
    for rank, row in enumerate((first, second)):
        cells = (cell + f"@0.{1 - rank}" if "SEND" in cell or "RECV" in cell else cell for cell in row.split(","))
        rows[f"0.{rank}"] = " ".join(cells)
    return Schedule.from_text(Shape(1, 2, micro_batches), rows, **arguments)


def summary(findings: list[Finding]) -> list[tuple[str, str | None, int | None, str | None]]:
    return [(f.rule, f.worker, f.position, f.instruction) for f in findings]


RANK_1 = "1F0,1B0,1F1,1B1"
SENT = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1"
RECEIVED = "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
ONE = "1RECV_F0,1F0,1B0,1SEND_B0"

# Number and name -> rows, micro-batches, findings.
DEFECTS = {
    "3 micro-batch out of range": (
        "0F0,0F7,0B0,0B7", "1F0,1B0,1F7,1B7", 2,
        [("missing", None, None, None), ("micro-batch-range", "0.0", 1, "0F0.7"),
         ("micro-batch-range", "0.1", 2, "1F0.7")],
    ),
    "4 backward twice and never": (
        "0F0,0F1,0B0,0I0,0W0", RANK_1, 2, [("missing", "0.0", 1, "0F0.1"), ("mixed-backward", "0.0", 3, "0I0.0")],
    ),
    "6 deadlock across ranks": ("0F0,0B0,0F1,0B1", "1F1,1F0,1B0,1B1", 2, [("deadlock", "0.0", 1, "0B0.0")]),
    "7 receives out of order": (SENT, RECEIVED.replace("1RECV_F0,1RECV_F1", "1RECV_F1,1RECV_F0"), 2,
                                [("fifo", "0.1", 0, "1RECV_F0.1@0.0")]),
    "12 W before I": ("0F0,0SEND_F0,0W0,0RECV_B0,0I0", ONE, 1, [("order", "0.0", 2, "0W0.0")]),
    "16 unsafe where serialised": (SENT, "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1", 2,
                                   [("serialised-transport", "0.0", 3, "0SEND_F0.1@0.1")]),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_that_other_validators_miss_are_found_once_at_their_place(name):
    first, second, micro_batches, expected = DEFECTS[name]
    assert summary(check(two_ranks(first, second, micro_batches))) == expected


def test_leaving_out_every_reduce_is_an_error_only_for_a_schedule_about_to_run():  # 14
    schedule = two_ranks(SENT, RECEIVED)
    assert check(schedule) == []
    (finding,) = check(schedule, about_to_run=True)
    assert finding.rule == "not-lowered"
    assert "REDUCE_GRAD" in finding.message


def test_a_peak_over_the_limit_is_found_at_the_instruction_that_sets_it():  # 17
    schedule = two_ranks("0F0,0F1,0B0,0B1", RANK_1)
    (finding,) = check(schedule, limits=[1, 1])
    assert (finding.rule, finding.worker, finding.position, finding.instruction) == (
        "activation-limit", "0.0", 1, "0F0.1")  # fmt: skip
    assert "holds 2 activations here at time 1, the limit of rank 0 is 1" in finding.message
    assert check(schedule, limits=[2, 1]) == []


def test_the_message_of_a_deadlock_follows_the_cycle_once():
    (finding,) = check(two_ranks("0F0,0B0,0F1,0B1", "1F1,1F0,1B0,1B1"))
    waits = [part.split(" on worker")[0] for part in finding.message.split(": ", 1)[1].split("; ")]
    assert waits == ["0B0.0", "1B0.0", "1F0.0", "1F0.1", "0F0.1"]


# Valid schedules, and edits: (rule, schedule, worker, old text, new text, instruction of the finding).
SHAPE = Shape(2, 2, 2)
BASES = {
    "plain": lower(one_f_one_b(SHAPE)),
    "buckets": lower(replace(one_f_one_b(SHAPE), buckets=3)),
    "gathers": lower(replace(interleaved(Shape(2, 2, 2, 2)), gathers=True)),
    "redundant": Schedule.from_text(
        Shape(1, 3, 2),
        {"0.0": "0F0 0F1 1R0 0B0 1R1 0B1", "0.1": "1F0 1F1 2R0 1B0 2R1 1B1", "0.2": "2F0 2B0 2F1 2B1"},
        placement={"0.0": [0, 1], "0.1": [1, 2]}, optimizer="barrier",
    ),
    "replay": Schedule.from_text(
        Shape(2, 1, 2), {"0.0": "0F0.0 0B0.0 0F0.1 0B0.1 0REPLAY1.0", "1.0": "0F1.0 0B1.0 0F1.1 0B1.1"}
    ),
    "offload": Schedule.from_text(
        Shape(1, 2, 2), {"0.0": "0F0 0OFFLOAD0 0F1 0RELOAD0 0I0 0W0 0B1", "0.1": "1F0 1B0 1F1 1B1"}
    ),
    "waits": Schedule.from_text(
        Shape(1, 2, 1), {"0.0": "0F0 0SEND_F0@0.1 0WAIT_SEND_F0 0RECV_B0@0.1 0B0",
                         "0.1": "1RECV_F0@0.0 1F0 1B0 1SEND_B0@0.0 1WAIT_SEND_B0"},
    ),
    "forward": Schedule.from_text(Shape(1, 1, 2), {"0.0": "0F0 0F1"}, forward_only=True),
}  # fmt: skip
EDITS = [
    ("stage-range", "plain", "0.0", "0STEP", "0STEP 5F0.0", "5F0.0"),
    ("micro-batch-range", "plain", "0.0", "0STEP", "0STEP 0F2.0", "0F2.0"),
    ("not-hosted", "plain", "0.0", "0STEP", "0STEP 1STEP", "1STEP"),
    ("missing", "plain", "0.0", "0B0.1 ", "", "0F0.1"),
    ("duplicate", "plain", "0.0", "0B0.1 ", "0B0.1 0B0.1 ", "0B0.1"),
    ("mixed-backward", "plain", "0.0", "0B0.1 ", "0B0.1 0W0.1 ", "0W0.1"),
    ("order", "plain", "1.1", "1RECV_F1.1@1.0 1B1.0 1SEND_B1.0@1.0 1F1.1", "1B1.0 1SEND_B1.0@1.0 1F1.1 1RECV_F1.1@1.0",
     "1F1.1"),
    ("wrong-peer", "plain", "0.0", "0SEND_F0.1@0.1", "0SEND_F0.1@1.1", "0SEND_F0.1@1.1"),
    ("wrong-peer", "plain", "0.0", "0STEP", "0STEP 0SEND_F0.0@0.0", "0SEND_F0.0@0.0"),
    ("duplicate-transfer", "plain", "0.1", "1SEND_B0.1@0.0", "1SEND_B0.1@0.0 1SEND_B0.1@0.0", "1SEND_B0.1@0.0"),
    ("not-made-here", "plain", "1.0", "0STEP", "0SEND_F0.1@0.1 0STEP", "0SEND_F0.1@0.1"),
    ("missing-reduce", "plain", "0.1", "1REDUCE_GRAD ", "", None),
    ("missing-step", "plain", "1.1", " 1STEP", "", None),
    ("duplicate-update", "plain", "0.1", "1STEP", "1STEP 1STEP", "1STEP"),
    ("early-reduce", "plain", "0.0", "0B0.1 0REDUCE_GRAD", "0REDUCE_GRAD 0B0.1", "0REDUCE_GRAD"),
    ("bucket-range", "buckets", "0.0", "0REDUCE_BUCKET/1 ", "0REDUCE_BUCKET/1 0REDUCE_BUCKET/2 ", "0REDUCE_BUCKET/2"),
    ("weight-parts", "buckets", "0.0", "0W_PART0.1/1 ", "", "0W_PART0.1/0"),
    ("weight-parts", "buckets", "0.0", "0W_PART0.1/0 ", "0W0.1 0W_PART0.1/0 ", "0W_PART0.1/0"),
    ("duplicate", "buckets", "0.0", "0W_PART0.1/0 ", "0W_PART0.1/0 0W_PART0.1/0 ", "0W_PART0.1/0"),
    ("missing-bucket", "buckets", "0.0", "0REDUCE_BUCKET/0 ", "", None),
    ("duplicate-update", "buckets", "0.0", "0REDUCE_BUCKET/1 ", "0REDUCE_BUCKET/1 0REDUCE_BUCKET/1 ",
     "0REDUCE_BUCKET/1"),
    ("early-bucket", "buckets", "0.0", "0W_PART0.1/0 0REDUCE_BUCKET/0 ", "0REDUCE_BUCKET/0 0W_PART0.1/0 ",
     "0REDUCE_BUCKET/0"),
    ("early-reduce", "buckets", "0.0", "0W_PART0.1/2 0REDUCE_GRAD", "0REDUCE_GRAD 0W_PART0.1/2", "0REDUCE_GRAD"),
    ("missing-gather", "gathers", "1.1", " 1GATHER_PARAMS", "", None),
    ("duplicate-update", "gathers", "1.1", "1GATHER_PARAMS", "1GATHER_PARAMS 1GATHER_PARAMS", "1GATHER_PARAMS"),
    ("order", "gathers", "1.1", "1STEP 3GATHER_PARAMS 1GATHER_PARAMS", "3GATHER_PARAMS 1GATHER_PARAMS 1STEP",
     "1GATHER_PARAMS"),
    ("reduce-order", "gathers", "1.1", "3GATHER_PARAMS 1GATHER_PARAMS", "1GATHER_PARAMS 3GATHER_PARAMS",
     "1GATHER_PARAMS"),
    ("order", "redundant", "0.0", "0F0.0 0F0.1 1R0.0", "1R0.0 0F0.0 0F0.1", "1R0.0"),
    ("redundant", "redundant", "0.0", "1R0.0 0B0.0", "0B0.0 1R0.0", "1R0.0"),
    ("redundant", "redundant", "0.0", "1R0.0", "1R0.0 1R0.0", "1R0.0"),
    ("redundant", "redundant", "0.0", "1R0.0", "0R0.0", "0R0.0"),
    ("redundant", "redundant", "0.1", "2R0.0", "1R0.0", "1R0.0"),
    ("not-hosted", "redundant", "0.0", "1R0.0", "2R0.0", "2R0.0"),
    ("replay", "replay", "0.0", "0REPLAY1.0", "0REPLAY0.0", "0REPLAY0.0"),
    ("replay", "replay", "0.0", "0REPLAY1.0", "0REPLAY1.0 0REPLAY1.0", "0REPLAY1.0"),
    ("offload", "offload", "0.0", "0RELOAD0.0 ", "", "0OFFLOAD0.0"),
    ("offload", "offload", "0.0", "0OFFLOAD0.0 ", "", "0RELOAD0.0"),
    ("offload", "offload", "0.0", "0OFFLOAD0.0", "0OFFLOAD0.0 0OFFLOAD0.0", "0OFFLOAD0.0"),
    ("offload", "offload", "0.0", "0RELOAD0.0", "0RELOAD0.0 0OFFLOAD0.1", "0OFFLOAD0.1"),
    ("order", "offload", "0.0", "0F0.0 0OFFLOAD0.0", "0OFFLOAD0.0 0F0.0", "0OFFLOAD0.0"),
    ("order", "offload", "0.0", "0RELOAD0.0 0I0.0", "0I0.0 0RELOAD0.0", "0I0.0"),
    ("order", "offload", "0.0", "0OFFLOAD0.0 0F0.1 0RELOAD0.0", "0RELOAD0.0 0F0.1 0OFFLOAD0.0", "0RELOAD0.0"),
    ("order", "waits", "0.0", "0F0.0 0SEND_F0.0@0.1 0WAIT_SEND_F0.0", "0WAIT_SEND_F0.0 0F0.0 0SEND_F0.0@0.1",
     "0WAIT_SEND_F0.0"),
    ("wait-send", "waits", "0.0", "0B0.0", "0B0.0 0WAIT_SEND_B0.0", "0WAIT_SEND_B0.0"),
    ("beyond-forward", "forward", "0.0", "0F0.1", "0F0.1 0B0.0", "0B0.0"),
    ("missing", "forward", "0.0", " 0F0.1", "", None),
]  # fmt: skip


def edited(base: str, worker: str, old: str, new: str, **options) -> Schedule:
    valid = BASES[base]
    programs = valid.text()
    assert programs[worker].count(old) == 1, (worker, old, programs[worker])
    programs[worker] = programs[worker].replace(old, new)
    kept = {"placement": valid.placement, "optimizer": valid.optimizer, "buckets": valid.buckets}
    return Schedule.from_text(valid.shape, programs, **kept, forward_only=valid.forward_only, **options)


def test_the_bases_of_the_edits_are_valid():
    for valid in BASES.values():
        assert check(valid) == []


@pytest.mark.parametrize(("code", "base", "worker", "old", "new", "instruction"), EDITS)
def test_one_edit_of_a_valid_program_gives_one_finding_at_its_place(code, base, worker, old, new, instruction):
    require_one_finding(edited(base, worker, old, new), code, worker, instruction)


def require_one_finding(schedule: Schedule, code: str, worker: str | None, instruction: str | None):
    (finding,) = check(schedule)
    assert (finding.rule, finding.worker or worker, finding.instruction) == (code, worker, instruction)
    if finding.position is not None:
        assert str(schedule.program(Worker.parse(worker))[finding.position]) == instruction


LOWERED = BASES["plain"].text()
RULE_EXAMPLES = {
    "no-host": (Schedule.from_text(Shape(1, 2, 1), {"0.0": "0F0 0B0"}, failed=["0.1"]), None, None),
    "failed-worker": (Schedule.from_text(SHAPE, LOWERED, failed=["1.1"]), "1.1", "1RECV_F1.0@1.0"),
    "apart": (
        Schedule.from_text(Shape(2, 1, 1), {"0.0": "0F0.0 0F1.0 0B1.0", "1.0": "0B0.0"}), "1.0", "0B0.0",
    ),
    "unreceived": (edited("plain", "0.1", "1RECV_F0.1@0.0 ", ""), "0.0", "0SEND_F0.1@0.1"),
    "unsent": (edited("plain", "0.0", "0SEND_F0.1@0.1 ", ""), "0.1", "1RECV_F0.1@0.0"),
    "no-transfer": (
        Schedule.from_text(SHAPE, {**LOWERED, "0.0": LOWERED["0.0"].replace("0SEND_F0.1@0.1 ", ""),
                                   "0.1": LOWERED["0.1"].replace("1RECV_F0.1@0.0 ", "")}), "0.1", "1F0.1",
    ),
    "early-step": (
        Schedule.from_text(Shape(1, 1, 1, 2), {"0.0": "0F0 1F0 1B0 0B0 1REDUCE_GRAD 1STEP 0REDUCE_GRAD 0STEP"},
                           optimizer="barrier"), "0.0", "1STEP",
    ),
    "reduce-order": (
        Schedule.from_text(Shape(2, 1, 1, 2), {"0.0": "0F0.0 1F0.0 1B0.0 0B0.0 1REDUCE_GRAD 0REDUCE_GRAD 1STEP 0STEP",
                                               "1.0": "0F1.0 1F1.0 1B1.0 0B1.0 0REDUCE_GRAD 1REDUCE_GRAD 1STEP 0STEP"}),
        "1.0", "0REDUCE_GRAD",
    ),
    "late-send": (
        two_ranks(SENT.replace("0SEND_F0,0F1", "0F1,0SEND_F0"), RECEIVED),
        "0.0", "0SEND_F0.0@0.1",
    ),
    "unused-transfer": (
        Schedule.from_text(SHAPE, {**LOWERED, "0.0": LOWERED["0.0"].replace("0F0.1 ", "0F0.1 0SEND_F0.1@1.1 "),
                                   "1.1": LOWERED["1.1"] + " 1RECV_F0.1@0.0"}), "1.1", "1RECV_F0.1@0.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", RULE_EXAMPLES)
def test_each_rule_alone_finds_its_example_once(code):
    require_one_finding(RULE_EXAMPLES[code][0], code, *RULE_EXAMPLES[code][1:])


def test_every_rule_has_an_example_a_severity_and_a_paragraph():
    elsewhere = {"deadlock", "fifo", "not-lowered", "activation-limit", "byte-limit"}
    elsewhere |= {"serialised-transport", "shared-communicators"}
    assert {rule.code for rule in all_rules()} == {code for code, *_ in EDITS} | set(RULE_EXAMPLES) | elsewhere
    for rule in all_rules():
        assert len(rule.documentation.split()) > 15, rule.code
        assert explain(rule.code) is rule
    assert explain("no-such-rule") is None
    warnings = {rule.code for rule in all_rules() if rule.severity == "warning"}
    assert warnings == {"serialised-transport", "late-send", "unused-transfer"}


def test_the_page_of_codes_is_up_to_date():
    page = (DOCS / "reference" / "codes.md").read_text()
    assert page == reference_page(), "write it again with: python -m recycle.ir.rules.reference docs/reference/codes.md"


def test_a_transfer_with_a_failed_peer_is_found_once_per_pair_of_workers():
    text = lower(one_f_one_b(Shape(2, 2, 3))).text()
    del text["1.1"]
    findings = check(Schedule.from_text(Shape(2, 2, 3), text, failed=["1.1"]))
    assert [(f.rule, f.worker, f.instruction) for f in findings] == [
        ("missing", None, None), ("failed-worker", "1.0", "0SEND_F1.0@1.1")]  # fmt: skip
    assert "stage 1 does not run micro-batch 1.0, 1.1, 1.2" in findings[0].message
    assert "and 5 more transfers with it" in findings[1].message


def test_reduce_before_the_gradient_of_a_tied_stage_is_early():
    programs = {"0.0": "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 1STEP 0STEP"}
    shape = Shape(1, 1, 1, 2)
    assert check(Schedule.from_text(shape, programs)) == []
    assert [f.rule for f in check(Schedule.from_text(shape, programs, ties=[[0, 1]]))] == ["early-reduce"]
    assert [f.rule for f in check(Schedule.from_text(shape, programs, ties=[[0, 7]]))] == ["stage-range"]


def test_recomputed_activations_count_from_their_backward():
    """Two forwards hold 3 bytes each; the backward makes 100 of it, of which 40 wait for W."""
    profile = Profile(activation=100.0, recomputed_from=3.0, weight_stash=0.4)
    held = {
        "0F0.0 0F0.1 0B0.0 0B0.1": 3 + 100,
        "0F0.0 0F0.1 0I0.0 0I0.1 0W0.0 0W0.1": 40 + 100,
        "0F0.0 0I0.0 0F0.1 0W0.0 0I0.1 0W0.1": 100,
    }
    for program, peak in held.items():
        schedule = Schedule.from_text(Shape(1, 1, 2), {"0.0": program})
        assert simulate(schedule, profile).peak_bytes == [peak]
        assert simulate(schedule, dataclasses.replace(profile, recomputed_from=None)).peak_bytes != [peak]


def test_bytes_count_static_and_held_bytes_of_the_stage():
    schedule = one_f_one_b(Shape(1, 2, 4))
    profile = Profile(activation=[100.0, 10.0], static=[1000.0, 2000.0])
    assert check(schedule, profile=profile, byte_limit=2010) == []
    (finding,) = check(schedule, profile=profile, byte_limit=2009)
    assert (finding.rule, finding.worker, finding.instruction) == ("byte-limit", "0.1", "1F0.0")
    assert "2010 bytes here at time 1 (2000 static, 10 of activations)" in finding.message
    findings = check(schedule, profile=profile, byte_limit=1100)
    assert [(f.rule, f.worker, f.instruction) for f in findings] == [
        ("byte-limit", "0.0", "0F0.1"), ("byte-limit", "0.1", None)]  # fmt: skip


def test_the_weight_stash_counts_between_I_and_W():
    schedule = Schedule.from_text(Shape(1, 1, 3), {"0.0": "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"})
    assert [f.instruction for f in check(schedule, limits=[2])] == ["0F0.2"]
    assert check(schedule, limits=[2], profile=Profile.uniform(weight_stash=0.5)) == []
    assert len(check(schedule, limits=[1.9], profile=Profile.uniform(weight_stash=0.5))) == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([4], "limits: lists 1 ranks, the schedule has 2"),
        ([2, math.nan], "limits: nan of rank 1 is not a number of activations"),
        (["2", 2], "limits: '2' of rank 0 is not a number of activations"),
    ],
)
def test_limits_that_are_not_numbers_are_refused(limits, message):
    schedule = gpipe(Shape(1, 2, 2))
    with pytest.raises(JobError, match=message):
        check(schedule, limits=limits)
    assert check(schedule, limits=np.array([2.0, math.inf])) == []
    with pytest.raises(JobError, match="byte_limit: nan is not a number of bytes"):
        check(schedule, byte_limit=math.nan)


def test_errors_come_before_warnings_and_follow_worker_and_position():
    schedule = two_ranks(
        "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0RECV_B0,0B0,0SEND_F2,0RECV_B1,0B1,0RECV_B2,0B2",
        "1RECV_F0,1RECV_F1,1F0,1F0,1B0,1SEND_B0,1F1,1B1,1B1,1SEND_B1,1RECV_F2,1F2,1B2,1SEND_B2",
        micro_batches=3,
    )
    assert [(f.severity, f.rule, f.worker, f.position) for f in check(schedule)] == [
        ("error", "duplicate", "0.1", 3),
        ("error", "duplicate", "0.1", 8),
        ("warning", "late-send", "0.0", 7),
    ]


@bounded
@given(randoms)
def test_random_valid_schedules_have_no_findings_as_built_and_lowered(rng):
    schedule = random_schedule(rng)
    assert check(schedule) == []
    assert check(lower(schedule), about_to_run=True) == []


@pytest.mark.slow
@settings(bounded, max_examples=80)
@given(randoms)
def test_random_programs_never_make_the_checker_raise(rng):
    shape = Shape(rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 2))
    workers = list(shape.workers())

    def number(most):
        return rng.choice([rng.randint(0, most), rng.randint(-2, most + 2)])

    def random_instruction():
        cls, stage = rng.choice(KIND_CLASSES), number(shape.stages)
        micro_batch = MicroBatch(number(shape.pipelines), number(shape.micro_batches))
        if cls is OverlappedPair:
            return OverlappedPair(Forward(stage, micro_batch), Backward(number(shape.stages), micro_batch))
        return make_instruction(cls, stage=stage, micro_batch=micro_batch, peer=rng.choice(workers), bucket=number(2))

    schedule = Schedule.build(
        shape, {worker: [random_instruction() for _ in range(rng.randint(0, 8))] for worker in workers},
        failed=rng.sample(workers, rng.randint(0, len(workers))),
        placement={w: rng.sample(range(shape.stages), rng.randint(0, shape.stages)) for w in workers},
        optimizer=rng.choice(["staggered", "barrier"]), ties=[(0, 1, 9)] if rng.random() < 0.3 else [],
    )  # fmt: skip
    findings = check(schedule, limits=[1.0] * shape.ranks, byte_limit=2.0, about_to_run=rng.random() < 0.5)
    assert findings
    assert lower(schedule).columns is not None
    with contextlib.suppress(ScheduleError):
        assert timeline_of(schedule).makespan >= 0
