"""Families, kinds, transports and systems of other packages: by `--import` or entry points, or refused in one line."""

import sys
from pathlib import Path

import pytest

from recycle import JobError, systems
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.plugin import transport_named
from recycle.ir import plugins
from recycle.ir.families import BUILT_IN, FAMILIES, register
from recycle.ir.kinds import KIND_CLASSES
from recycle.systems import comparison
from recycle.systems.checkpoint_restart import HotSpare
from tests.kinds import forget
from tests.test_docs import blocks

EMULATED = """
[shape]
pipelines = 2
ranks = 2
micro_batches = 2
[model]
kind = "emulated"
layers = 2
[train]
checkpoint_every = 0
"""
KIND = """
from recycle.ir.kinds import Compute, InstructionKind, register

@register(InstructionKind(token="OWN", title="own", seconds=("{seconds}",)))
class Own({base}):
    __slots__ = ()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current directory, with a module of the documentation for each of a family and a kind."""
    family, _, registration = blocks("docs/guides/add-a-family.md", "python")
    (tmp_path / "family_alone.py").write_text(family)
    (tmp_path / "own_family.py").write_text(f"{family}\n\n{registration}")
    (tmp_path / "rerun.py").write_text(blocks("docs/guides/add-an-instruction.md", "python")[0])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.setattr(systems, "comparison", comparison)  # restored after a test that imports it again
    modules, kinds = set(sys.modules), len(KIND_CLASSES)
    yield tmp_path
    for name in set(FAMILIES) - set(BUILT_IN):
        del FAMILIES[name]
    while len(KIND_CLASSES) > kinds:
        forget(KIND_CLASSES[-1])
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def install(**groups: str):
    """Install a package with these entry points in a folder of Python's path."""
    about = Path("others-1.0.dist-info")
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("\n".join(f"[recycle.{group}]\n{line}" for group, line in groups.items()))
    sys.path.insert(0, str(Path.cwd()))


def write_checked():
    """The schedule file with the new kind that the page on instructions writes."""
    exec(compile(blocks("docs/guides/add-an-instruction.md", "python")[1], "add-an-instruction.md", "exec"), {})


def test_a_family_and_a_kind_of_named_modules_are_known_to_commands(command):
    written = command("schedule one-at-a-time --import own_family -P 2 -m 3 -o own.json")
    assert written.status == 0, written.err
    assert command("simulate own.json --json").json["makespan"] == 3 * 2 * 3
    assert command("view own.json --export own.svg").status == 0
    assert command("check --import rerun own.json").status == 0
    write_checked()
    assert command("check checked.json --json").json["findings"] == []
    assert command("convert checked.json checked.trace.json").status == 0


def test_entry_points_of_installed_packages_are_known(command):
    install(families="mine = family_alone:one_at_a_time", kinds="rerun = rerun:Rerun")
    written = command("schedule mine -P 2 -m 3 -o mine.json")
    assert written.status == 0, written.err
    assert KIND_CLASSES[-1].token == "RERUN"
    write_checked()
    assert command("check checked.json").status == 0
    assert command("schedule mine -P 2 -m 3 -V 2").refused("one-at-a-time: needs chunks = 1")


def test_entry_points_name_transports_and_systems(monkeypatch):
    install(
        transports="fast = recycle.exec.transport.gloo:Gloo",
        systems="mine = recycle.systems.checkpoint_restart:HotSpare",
    )
    assert transport_named("fast") is Gloo
    monkeypatch.delitem(sys.modules, "recycle.systems.comparison")
    from recycle.systems.comparison import KNOWN

    assert KNOWN["mine"] is HotSpare
    assert list(KNOWN)[1:] == list(comparison.KNOWN)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("--import broken", 'module "broken" was not found')),
        ("import not_installed_here", ("--import broken", "not_installed_here", "broken.py:1")),
        ("def f(:", ("--import broken", "SyntaxError", "broken.py:1")),
        ("\nraise SystemExit(3)", ("--import broken", "SystemExit", "broken.py:2")),
        ("from recycle.ir.families import register\n@register('1f1b')\ndef f(shape): ...", ("already registered",)),
        (KIND.format(seconds="forward", base="object"), ("Own", "Compute, Transfer or StageWide")),
        (KIND.format(seconds="nothing", base="Compute"), ("nothing", "profile")),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused(command, text, words):
    if text is not None:
        Path("broken.py").write_text(text)
    assert command("schedule 1f1b --import broken -P 2 -m 2").refused(*words)


@pytest.mark.parametrize(
    ("group", "line", "words"),
    [
        ("families", "mine = nowhere:build", ("nowhere",)),
        ("families", "mine = family_alone:nothing", ("nothing",)),
        ("families", "mine = string:digits", ("function",)),
        ("families", "1f1b = family_alone:one_at_a_time", ("1f1b",)),
        ("kinds", "mine = fractions:Fraction", ("fractions:Fraction",)),
        ("kinds", "mine = nowhere", ("nowhere",)),
    ],
)
def test_a_broken_entry_point_is_refused_with_its_package(command, group, line, words):
    install(**{group: line})
    assert command("schedule zb-h1 -P 2 -m 2").refused(f"recycle.{group}", "package others", *words)


def test_errors_of_a_family_name_it(command):
    register("falls")(lambda shape, optimizer: shape.nothing)
    register("returns")(lambda shape, optimizer: 3)
    for name, words in (("falls", "AttributeError"), ("returns", "returned int")):
        assert command(f"schedule {name} -P 2 -m 2").refused(f"family {name}", words)
    with pytest.raises(ValueError, match="one word"):
        register("two words")(print)


@pytest.mark.parametrize(
    ("name", "value"), [("mine", "nowhere:Mine"), ("oobleck", "recycle.systems.checkpoint_restart:HotSpare")]
)
def test_a_broken_system_is_refused(monkeypatch, name, value):
    install(systems=f"{name} = {value}")
    monkeypatch.delitem(sys.modules, "recycle.systems.comparison")
    with pytest.raises(JobError, match=rf"recycle\.systems: {name} of the package others"):
        import recycle.systems.comparison  # noqa: F401


@pytest.mark.process
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mine = raises:Mine", ("package others", "RuntimeError", "raises.py:1")),
        ("mine = nowhere:Mine", ("package others", "nowhere")),
        ("mine = fractions:Fraction", ("package others", "fractions:Fraction", "TransportPlugin")),
        ("gloo = recycle.exec.transport.gloo:Gloo", ("package others", "gloo")),
        (None, ('transport: "raises:Mine"', "RuntimeError", "raises.py:1")),
    ],
)
def test_a_broken_transport_is_refused(command, monkeypatch, line, words):
    Path("raises.py").write_text("raise RuntimeError('not here')")
    if line is None:
        monkeypatch.syspath_prepend(Path.cwd())
    else:
        install(transports=line)
    name = "raises:Mine" if line is None else line.split(" ")[0]
    Path("job.toml").write_text(f'{EMULATED}[membership]\ntransport = "{name}"\n')
    assert command("train job.toml --run run").refused(*words)


@pytest.mark.parametrize("system", [3, lambda scenario: scenario.nothing, lambda scenario: None])
def test_a_system_that_cannot_be_made_is_refused(monkeypatch, system):
    monkeypatch.setitem(comparison.KNOWN, "mine", system)
    with pytest.raises(JobError, match="--systems: mine"):
        comparison.make_system("mine", None)


@pytest.mark.process
def test_worker_processes_know_the_kind(command):
    Path("job.toml").write_text(EMULATED)
    assert command("check --import rerun job.toml").status == 2
    write_checked()
    run = command("train job.toml --schedule checked.json --steps 2 --run run")
    assert run.status == 0, run.err
    assert "RERUN" in Path("run", "trace.json").read_text()
