"""Schedule files: formats read back, golden files stay as they are, and damaged or hostile files are refused."""

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from recycle import JobError, Profile, Schedule, ScheduleError, Shape, check, lower, simulate
from recycle.ir import formats
from recycle.ir.columns import MOST_INSTRUCTIONS
from recycle.ir.families import gpipe, interleaved, one_f_one_b, zb_h1
from recycle.ir.formats import named_schedule, torch_csv
from recycle.ir.formats.schedule_input import Unpacked
from recycle.ir.lower import forward_only
from tests import CASES
from tests.hostile import any_bytes, read_or_refused, restructured, retold
from tests.ir.random_schedules import random_schedule


@pytest.mark.parametrize("name", formats.FORMATS)
@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_a_schedule_that_a_format_can_hold_reads_back_equal(name, rng):
    """Other formats than native and Chrome's hold the order of one pipeline only, so these also get families."""
    keeps_all = name in ("native", "chrome-trace")
    families = (interleaved(Shape(1, 2, 4, 2)), one_f_one_b(Shape(1, 3, 4)), gpipe(Shape(1, 2, 3)))
    schedule = random_schedule(rng) if keeps_all or rng.random() < 0.5 else rng.choice(families)
    if name != "megatron-table" and rng.random() < 0.4:
        schedule = lower(schedule)
    if keeps_all:
        schedule = rng.choice([schedule, forward_only(schedule), replace(schedule, buckets=3, gathers=True)])
        schedule = lower(schedule) if name == "chrome-trace" and schedule.buckets > 1 else schedule
        schedule = schedule.with_metadata(parent='"\\é', gap=[0.5, None])
    else:
        schedule = replace(schedule, optimizer="staggered")
    try:
        text = "".join(formats.FORMATS[name].dumps(schedule))
    except ScheduleError:
        assert not keeps_all
        return
    reread = read(name, text.encode(), "plan.x")
    assert reread == schedule
    assert not keeps_all or reread.metadata == schedule.metadata


@pytest.mark.parametrize("name", ["1f1b_lowered.json", "adaptive_without_1.2.json"])
def test_the_golden_file_is_read_and_written_byte_for_byte(name):
    text = (CASES / name).read_text()
    assert Schedule.loads(text, name).dumps() == text


def document(**changes) -> str:
    built = json.loads(one_f_one_b(Shape(1, 2, 2)).dumps())
    built.update(changes)
    return json.dumps({key: value for key, value in built.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON|Expected `object`"),
        ("{}", 'is not a schedule: "format" must be "recycle-schedule"'),
        (document(version=2), "version 2 is not known; this recycle reads version 1"),
        (document(colour="red"), "unknown field `colour`"),
        (document(programs=...), "missing required field `programs`"),
        (document(programs={"0.0": 3}), r"Expected `str`, got `int` - at `\$.programs\[...\]`"),
        (document(programs={"0.0": "0F0 0Q0"}), r"worker 0\.0, position 1: '0Q0' is not an instruction"),
        (document(programs={"5.0": ""}), r"programs: worker 5\.0 is outside the grid"),
        (document(shape={"pipelines": 1, "ranks": 2}), "shape: micro_batches is missing"),
        (document(shape={"pipelines": 1, "ranks": 2, "micro_batches": 2, "depth": 1}), "shape: unknown key 'depth'"),
        (document(shape={"pipelines": 10**9, "ranks": 2, "micro_batches": 2}), "too large"),
        (document(optimizer="none"), "Invalid enum value 'none'"),
    ],
)
def test_a_file_that_is_not_a_schedule_is_refused_by_name_and_place(text, complaint):
    with pytest.raises(ScheduleError, match=complaint) as error:
        Schedule.loads(text, "plan.json")
    assert str(error.value).startswith("plan.json: ")


def test_metadata_that_is_not_json_is_refused_and_leaves_the_old_file(tmp_path):
    schedule, file = one_f_one_b(Shape(1, 2, 2)), tmp_path / "plan.json"
    schedule.save(file)
    before = file.read_bytes()
    for value in (float("inf"), float("nan"), {1, 2}):
        with pytest.raises(ScheduleError, match="metadata: only finite JSON values"):
            schedule.with_metadata(gap=value).save(file)
    assert file.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_format_is_known_by_suffix_then_by_content(tmp_path):
    schedule = one_f_one_b(Shape(1, 2, 2))
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ScheduleError, match=r"notes\.txt: is not a schedule file: .* native \(\.json\)"):
        formats.read(tmp_path / "notes.txt")
    for name in ("a.json", "a.csv", "a.trace.json", "a.chrome.json", "A.TRACE.JSON"):
        formats.write(schedule, tmp_path / name)
        is_trace = name.lower() in ("a.trace.json", "a.chrome.json")
        assert (b'"recycle-timeline"' in (tmp_path / name).read_bytes()) == is_trace
        for other in ("plain", "plain.json") if name != "a.csv" else ("plain",):
            (tmp_path / other).write_bytes((tmp_path / name).read_bytes())
            assert formats.read(tmp_path / other) == schedule
    with pytest.raises(ScheduleError, match=r"'xml' is not a format: known are native"):
        formats.read(tmp_path / "plain", "xml")
    with pytest.raises(ScheduleError, match=r"no format has the suffix '\.xml'"):
        formats.write(schedule, tmp_path / "plan.xml")
    formats.write(schedule, tmp_path / "plan.xml", "native")
    assert formats.read(tmp_path / "plan.xml") == schedule
    with pytest.raises(ScheduleError, match="format native stores no times"):
        formats.write(schedule, tmp_path / "plain.json", profile=Profile())


SHAPE = Shape(1, 2, 3)


def test_a_family_comes_before_a_file_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zb-h1").write_text("not a schedule")
    assert named_schedule("zb-h1", SHAPE).text() == zb_h1(SHAPE).text()


def test_a_name_that_is_neither_a_file_nor_a_family_is_refused():
    with pytest.raises(JobError, match=r"schedule 1f2b: is neither a file nor a family; families are gpipe, 1f1b"):
        named_schedule("1f2b", SHAPE)


quick = settings(max_examples=60, suppress_health_check=[*HealthCheck])

SCHEDULES = (
    lower(one_f_one_b(Shape(1, 2, 3))),
    interleaved(Shape(1, 2, 2, 2)),
    torch_csv.loads("0F0,0F1,3F0,3B0,(3F1;0B0)OVERLAP_F_B,3B1,0B1\n1F0,2F0,1F1,(2F1;2B0)OVERLAP_F_B,1B0,2I1,1B1,2W1"),
    Schedule.from_text(Shape(2, 1, 1, 2), {"0.0": "0F0.0 1F0.0 1B0.0 0B0.0 0F1.0 1F1.0 1B1.0 0B1.0"}, failed=["1.0"],
                       ties=[[0, 1]], optimizer="barrier", metadata={"gap": 0.5, "parents": [{"name": "a"}]}),
    lower(one_f_one_b(Shape(2, 2, 2))),
)  # fmt: skip


def seeds(name: str) -> list[bytes]:
    """What the format writes of the schedules that it can hold."""
    dumps, texts = formats.FORMATS[name].dumps, []
    for schedule in SCHEDULES:
        with contextlib.suppress(ScheduleError):
            texts.append("".join(dumps(schedule)).encode())
    return texts


def read(name: str, content: bytes, where: str) -> Schedule:
    return formats.load_unpacked(Unpacked(content, MOST_INSTRUCTIONS), where, name).order()


SEEDS = {name: seeds(name) for name in formats.FORMATS}


def documents(name: str):
    """The seeds that are JSON, parsed."""
    parsed = []
    for seed in SEEDS[name]:
        with contextlib.suppress(ValueError):
            parsed.append(json.loads(seed))
    return parsed


DOCUMENTS = {name: parsed for name in formats.FORMATS if (parsed := documents(name))}


def require_read_or_refused(name: str, content: bytes):
    schedule = read_or_refused(lambda: read(name, content, "plan.x"), ScheduleError, "plan.x")
    if schedule is None:
        return
    check(schedule)
    lower(schedule)
    with contextlib.suppress(ScheduleError):
        assert simulate(schedule).makespan >= 0
    assert Schedule.loads(schedule.dumps()) == schedule
    with contextlib.suppress(ScheduleError):
        assert read(name, "".join(formats.FORMATS[name].dumps(schedule)).encode(), "again") is not None


@pytest.mark.parametrize("spoil", [lambda _: any_bytes(), retold], ids=["bytes", "retold"])
@pytest.mark.parametrize("name", formats.FORMATS)
@quick
@given(st.data())
def test_a_spoiled_file_is_read_or_refused(name, spoil, data):
    require_read_or_refused(name, data.draw(spoil(SEEDS[name])))


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
@quick
@given(st.data())
def test_a_file_with_values_of_other_kinds_is_read_or_refused(name, data):
    require_read_or_refused(name, json.dumps(data.draw(restructured(DOCUMENTS[name]))).encode())
