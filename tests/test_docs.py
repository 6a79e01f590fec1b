"""The code in the guides runs as printed, and files on the pages are valid."""

import json
import re
import shlex
from dataclasses import fields

import pytest

from recycle import Profile, Schedule, ScheduleError, Shape, check
from recycle.cli import main
from recycle.ir import families
from recycle.ir.gaps import GapCause
from recycle.ir.instruction import parse_instruction
from tests import DOCS, ROOT


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def part(page: str, begin: str, end: str) -> str:
    """What a page has between two texts."""
    return (DOCS / page).read_text().split(begin)[1].split(end)[0]


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (
            "docs/guides/write-a-schedule.md",
            [
                "  0.0 F0-F1-F2-",
                "1RECV_F0.0@0.0 1F0.0",
                "a cycle of waits: 0B0.0 on worker 0.0 (position 1) waits for 1B0.0",
            ],
        ),
        (
            "docs/guides/read-a-timeline.md",
            ["\n0.0 1.0 INPUT 1F0.0\n1.0 1.5 TRANSFER 1F0.0\n4.5 10.5 ORDER 1B0.0\n", "+0.00\n", "\n-6.0\nIdle for "],
        ),
        ("docs/guides/compare.md", ["0.9", "'stop'", "'restart'"]),
        ("README.md", ["  1.1 xxx"]),
    ],
)
def test_code_of_a_page_runs_from_top_to_bottom(page, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks(page, "python")), page, "exec"), {})
    printed = capsys.readouterr().out
    assert [text for text in says if text not in printed] == []


def test_tests_named_by_the_support_page_exist():
    named = set(re.findall(r"`(exec/[a-z_/]+\.py)`", (DOCS / "reference" / "support.md").read_text()))
    assert len(named) > 10
    assert {name for name in named if not (ROOT / "tests" / name).is_file()} == set()


def test_the_family_and_the_test_of_the_family_page_run(monkeypatch):
    family, its_test, _ = blocks("docs/guides/add-a-family.md", "python")
    (registration,) = blocks("docs/guides/add-a-family.md", "diff")
    assert '"one-at-a-time": one_at_a_time' in registration
    defined = {}
    exec(compile(family, "one_at_a_time.py", "exec"), defined)
    one_at_a_time = defined["one_at_a_time"]
    monkeypatch.setattr(families, "one_at_a_time", one_at_a_time, raising=False)
    monkeypatch.setitem(families.FAMILIES, "one-at-a-time", one_at_a_time)
    exec(compile(its_test, "test_one_at_a_time.py", "exec"), defined)
    run = defined["test_bubble_and_peak_follow_the_formulas"]
    sizes, times = (mark.args[1] for mark in run.pytestmark)
    for ranks, micro_batches in sizes:
        for given in times:
            run(ranks, micro_batches, given)
    assert check(one_at_a_time(Shape(2, 3, 4))) == []
    with pytest.raises(ScheduleError, match="one-at-a-time: needs chunks = 1, got 2"):
        one_at_a_time(Shape(1, 2, 2, 2))


def test_file_of_the_format_page_round_trips():
    (text,) = blocks("docs/reference/file-format.md", "json")
    schedule = Schedule.loads(text)
    assert schedule.dumps() == text
    assert check(schedule) == []
    keys = (DOCS / "reference" / "file-format.md").read_text().split("## Instructions")[0]
    assert all(f"`{key}`" in keys for key in json.loads(text))


def test_profile_page_is_valid_and_lists_every_key():
    (text,) = blocks("docs/reference/profile-file.md", "json")
    profile = Profile.from_bytes(text.encode(), "docs/reference/profile-file.md")
    profile.require(Shape(2, 2, 1))
    table = part("reference/profile-file.md", "| key | value |", "\n\n")
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    keys = [key for cell in cells for key in re.findall("`(.*?)`", cell)]
    assert sorted(keys) == sorted(field.name for field in fields(Profile))


def test_every_kind_of_event_is_on_its_page():
    table = part("reference/events.md", "| kind |", "\n\n")
    code = "\n".join(path.read_text() for path in (ROOT / "recycle" / "exec").rglob("*.py"))
    written = re.findall(r"(?:\blog|\b_?event)\(\s*\"([a-z-]+)\"", code)
    assert set(written) - set(re.findall(r"^\| `([a-z-]+)` \|", table, flags=re.MULTILINE)) == set()


def test_every_instruction_on_the_format_page_can_be_read():
    table = part("reference/file-format.md", "## Instructions", "\n## ")
    texts = re.findall(r"`(\(?[0-9][^` ]*)`", table)
    assert len(texts) >= 11
    assert [str(parse_instruction(text)) for text in texts] == texts


def test_the_first_commands_of_the_readme_run_as_printed(tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    first = part("../README.md", "## A first run", "##")
    commands = re.findall(r"^    (?:\$ )?recycle ((?:plan|schedule|view .*--export) .*)$", first, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command, comments=True))
        assert ended.value.code == 0, command
    printed = capsys.readouterr().out
    assert re.search(r"^0 0 1 0 +27 +29 +27 +27 +optimal", printed, flags=re.MULTILINE)
    drawn = [path.read_text() for path in (tmp_path / "failure.svg", ROOT / "docs" / "pictures" / "failure.svg")]
    assert [re.findall("period [0-9.]+", picture) for picture in drawn] == [["period 27", "period 27"]] * 2


def test_every_cause_of_a_gap_is_on_its_page():
    table = part("guides/read-a-timeline.md", "| cause |", "Where several hold")
    assert set(re.findall(r"^\| `([A-Z_]+)`", table, flags=re.MULTILINE)) == {cause.name for cause in GapCause}


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
