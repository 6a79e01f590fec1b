"""Functions by name: found in the folders that a job states, or refused in one line that says where it was looked."""

import sys
from pathlib import Path

import pytest

from recycle import Job, JobError
from recycle.job.named import function_named, name_of

KEY = "[model] provider"
GRID = "[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n"


def module(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return name


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_function_is_imported_and_named(tmp_path):
    (tmp_path / "package").mkdir()
    module(tmp_path / "package", "named_here", "class Made:\n    @staticmethod\n    def build(): return 5\n")
    function = function_named("package.named_here:Made.build", KEY, [str(tmp_path)])
    assert function() == 5
    assert name_of(function, KEY) == ("package.named_here:Made.build", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("named_a", '"named_a" is not the name of a function; write "package.module:function"'),
        ("named_a.py:build", r"module \"named_a.py\" is not in .* or on Python's path"),
        ("a/b:build", '"a/b:build" is not the name of a function'),
        ("nowhere_at_all:build", r"module \"nowhere_at_all\" is not in .* or on Python's path"),
        ("named_a:biuld", 'named_a has no "biuld"; it has build'),
        ("named_a:NUMBER", "named_a:NUMBER is of type int, not a function"),
        ("named_b:build", r"named_b cannot be imported \(ZeroDivisionError: division by zero\)"),
        ("named_c:build", r"named_c cannot be imported \(SyntaxError: .*"),
        ("named_d:build", "named_d imports nowhere_at_all, which is not installed"),
    ],
)
def test_missing_function_is_refused_with_the_key(tmp_path, text, complaint):
    module(tmp_path, "named_a", "NUMBER = 1\ndef build(): ...\n")
    module(tmp_path, "named_b", "1 / 0\n")
    module(tmp_path, "named_c", "def build(:\n")
    module(tmp_path, "named_d", "import nowhere_at_all\n")
    with pytest.raises(JobError, match=rf"^\[model\] provider: {complaint}") as refused:
        function_named(text, KEY, [str(tmp_path)])
    assert "\n" not in str(refused.value)


def test_function_that_cannot_be_imported_has_no_name():
    def inner() -> None: ...

    for function in (inner, lambda: None, print):
        with pytest.raises(JobError, match="cannot be imported by worker processes"):
            name_of(function, KEY)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[model]\nprovider = "build"\n', r"\[model\] provider: \"build\" is not the name of a function"),
        ('[train]\nloss = ":f"\n', r"\[train\] loss: \":f\" is not the name of a function"),
        ('[train]\nloss = "sgd"\n', r"\[train\] loss: \"sgd\" is not the name of a function"),
        ('[model]\nkind = "emulated"\nprovider = "a:b"\n', r"\[model\] provider: kind = \"emulated\" computes nothing"),
        ('[model]\nkind = "emulated"\nconfig = {a = 1}\n', r"\[model.config\]: kind = \"emulated\" has no config"),
        (
            '[data]\nkind = "megatron"\npath = "x"\nprovider = "a:b"\n',
            r"\[data\] provider: kind = \"megatron\" also",
        ),
        (
            '[times]\nprofile = "analytic"\n[model]\nprovider = "a:b"\n',
            r"\[times\] profile: the analytic model",
        ),
        ("[model.config]\nx = {y = 1}\n", r"\[model\] config\[\.\.\.\]: expected"),
    ],
)
def test_a_job_that_contradicts_itself_is_refused(text, complaint):
    with pytest.raises(JobError, match=f"^job.toml: {complaint}"):
        Job.from_toml(GRID + text, "job.toml")


def test_functions_are_imported_from_the_jobs_folder(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(GRID + '[model]\nprovider = "a:b"\n[model.config]\nkv_channels = 8\nrotary_interleaved = true\n')
    job = Job.load(path)
    assert job.model.import_from == [str(tmp_path)]
    assert job.model.config == {"kv_channels": 8, "rotary_interleaved": True}
    assert Job.from_toml(job.to_toml()) == job
    path.write_text(GRID + '[model]\nimport_from = ["..", "/x"]\n[data]\nprovider = "a:b"\n')
    assert Job.load(path).model.import_from == [str(tmp_path / ".."), "/x"]
    path.write_text(GRID)
    assert Job.load(path).model.import_from is None
