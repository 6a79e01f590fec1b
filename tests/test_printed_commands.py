"""Every command that README, docs/, `--help` and the examples print runs here, in its shortest form.

Each page has a separate folder with the files that its commands name (`scene`), in which they run in order. What
cannot run here stands in `NOT_RUN` with its reason; its options are still read by the command's own parser.
"""

import argparse
import gzip
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from inspect import getdoc
from pathlib import Path

import pytest
import typer

from recycle import Shape
from recycle.cli import main
from recycle.cli.app import COMMANDS, command_of
from recycle.ir import plugins
from recycle.ir.families import BUILT_IN, FAMILIES
from recycle.ir.kinds import KIND_CLASSES
from tests import ROOT
from tests.cli.command import Command
from tests.cli.conftest import command as command
from tests.cli.test_inputs import write_traces
from tests.kinds import forget
from tests.test_docs import blocks
from tests.warm import run_torchrun

EMULATED = """
[shape]
pipelines = 2
ranks = 3
micro_batches = 2
[model]
kind = "emulated"
layers = 6
seconds_per_unit = 0.001
[train]
steps = 2
checkpoint_every = 1
[planner]
seconds = 0.1
[membership]
drift = 0
"""
REAL = """
[shape]
pipelines = 1
ranks = 2
micro_batches = 2
[model]
kind = "llama"
layers = 2
hidden = 16
heads = 2
sequence = 16
vocabulary = 256
[train]
steps = 2
checkpoint_every = 1
[planner]
seconds = 0.1
"""
REAL_PAGES = ("hugging-face.md", "megatron.md", "import-hf", "export-hf", "import-megatron", "export-megatron")
"""Pages whose commands move weights, so that their job and run are of a real model."""
STARTS = ("recycle", "python", "torchrun", "make", "pip", "sudo", "sbatch", "srun", "source", "kubectl")
NOT_RUN = {
    r"recycle agent|srun .*recycle agent": "needs an etcd and an agent on each node; tests/exec/launch/test_agent*.py",
    r"recycle drain": "needs a live run; tests/exec/launch",
    r"sbatch|kubectl": "needs a cluster",
    r"sudo .*try_here.sh": "needs root and etcd; tests/examples/test_cluster.py",
    r"make |pip install|source ": "installs or runs all tests",
    r"python examples/tiny_gpt/demo.py": "tests/examples/test_scripts.py runs it",
    r"python examples/megatron_data/write_dataset.py": "tests/examples/test_scripts.py runs it",
    r"torchrun .*megatron_loop": "tests/examples/test_scripts.py runs them",
    r"torchrun .*torch_pipelining": "tests/examples/test_scripts.py runs it",
    r"recycle train examples/own_model": "tests/examples/test_scripts.py runs it",
}
"""Pattern of a command -> why it is not run here, or where it is."""
SHORTER = (
    (r"@5-20\b", "@1-2"),
    (r"@10\b|@5\b", "@1"),
    (r"@20\b|@40\b|@9\b", "@2"),
    (r"--punish 20,7", "--punish 2,7"),
    (r"(recycle train|recycle.exec.worker)( .*)--steps \d+", r"\1\2--steps 3"),
    (r"(recycle train .*--fault (stop|nan|cut|flip|slow)\b.*)", r"\1 --explain"),  # tests/exec strikes with each
    (r"benchmarks/paper/gpt3_6_7b.toml|examples/tiny_gpt/job.toml", "job.toml"),
    (r"(recycle compare .*)", r"\1 --days 0.1"),
    (r"--days 90 (.*) --days 0.1", r"--days 0.1 \1"),
    (r"(recycle compare (?!.*--systems).*)", r"\1 --systems recycle,oobleck"),
    (r"(recycle profile job.toml .*)", r"\1 --repeats 1"),
    (r"(recycle advise .*)", r"\1 --count 1 --seeds 1"),
    (r"(recycle view (?!.*--export).*)", r"\1 --export shown.html"),
    (r"--open", ""),
    (r"(recycle plan .*--failures )3", r"\g<1>1"),
    (r"--nproc-per-node 4 -m recycle.exec.worker", "--nproc-per-node 6 -m recycle.exec.worker"),
    (r"(recycle \w+ .*one-at-a-time(?!.*--import).*)", r"\1 --import one_at_a_time"),
)
"""What is replaced, in this order, so that a command is short here."""
FAILURES = ("60000,remove,node1", "180000,add,node1", "400000,remove,node2", "900000,add,node2")
NAMES = {
    "JOB": "job.toml",
    "RUN_DIR": "runs/mine",
    "RUN": "runs/mine",
    "DIR": "runs/mine",
    "FILE": "events.csv",
    "TRACE": "traces/iteration_4",
}


def lines_of(page: str) -> Iterator[str]:
    """The lines of the blocks of code of a page that are not in a language."""
    fence = ""
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence in ("```console", "```bash", "```sh", "```") or (not fence and line.startswith("    ")):
            yield line.strip()


def printed() -> dict[str, list[str]]:
    """Commands by the page, the command's help or the example that prints them."""
    pages = [
        "README.md",
        "CONTRIBUTING.md",
        *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
    ]
    lines = {Path(page).name: list(lines_of(page)) for page in pages}
    for name in COMMANDS:
        text = getdoc(command_of(name).callback) or ""
        lines[name] = [line.removeprefix("Example: ").strip("*") for line in text.splitlines()]
    for path in sorted((ROOT / "examples").glob("*/*.py")):
        lines[path.relative_to(ROOT).as_posix()] = [line.strip() for line in path.read_text().splitlines()]
    commands_of = {}
    for place, candidates in lines.items():
        commands = [re.sub(r"\*\*.*| +# .*", "", line.removeprefix("$ ")) for line in candidates]
        commands_of[place] = [line for line in commands if re.match(rf"({'|'.join(STARTS)}) \S", line)]
    return {place: commands for place, commands in commands_of.items() if commands}


PRINTED = printed()


def reason(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command)), None)


def words_of(command: str) -> list[str]:
    """The words of a printed command; what is optional in brackets is given, a name in capitals stands for a file."""
    return [NAMES.get(word, word) for word in shlex.split(re.sub(r"[\[\]]", "", command))]


def shortened(command: str) -> list[str]:
    text = shlex.join(words_of(command))
    for pattern, by in SHORTER:
        text = re.sub(pattern, by, text)
    words = shlex.split(text)
    if words[:2] != ["recycle", "train"] or "--steps" in words:
        return words
    return [*words, "--steps", "4" if "--resume" in words else "3"]


RUN = [place for place, commands in PRINTED.items() if not all(map(reason, commands))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What all pages start from: schedules, and a job and a run of it, for both kinds of job."""
    folder = tmp_path_factory.mktemp("printed")
    for name, text in (("emulated", EMULATED), ("real", REAL)):
        (folder / name).mkdir()
        (folder / name / "job.toml").write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["train", str(folder / name / "job.toml"), "--run", str(folder / name / "run")])
        assert ended.value.code in (0, None)
    for name in ("fault-free", "adaptive", "plan", "1f1b", "zb-h1", "mine"):
        family = FAMILIES["zb-h1" if name == "zb-h1" else "1f1b"]
        family(Shape(2, 3, 2)).save(folder / f"{name}.json")
    return folder


@pytest.fixture
def scene(folder, tmp_path, monkeypatch, request):
    """The current directory: the files that the commands of a page name."""
    place = request.node.callspec.params["place"]
    source = folder / ("real" if place in REAL_PAGES else "emulated")
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    for path in (source / "job.toml", *folder.glob("*.json")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    copy = tmp_path / "runs" / "mine"
    copy.mkdir(parents=True)
    for path in source.joinpath("run").rglob("*"):
        target = copy / path.relative_to(source / "run")
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    (copy / "checkpoints" / "step-00000999").symlink_to("step-00000001")
    for name in ("latest", "tiny"):
        (tmp_path / "runs" / name).symlink_to("mine")
    family, _, registration = blocks("docs/guides/add-a-family.md", "python")
    (tmp_path / "one_at_a_time.py").write_text(f"{family}\n\n{registration}")
    kind, use = blocks("docs/guides/add-an-instruction.md", "python")
    (tmp_path / "rerun.py").write_text(kind)
    (tmp_path / "use.py").write_text(use)
    rows = [f"0,add,node{number}" for number in range(6)]
    (tmp_path / "events.csv").write_text("\n".join([*rows, *FAILURES]) + "\n")
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.setenv("RECYCLE_CACHE", str(folder / "cache"))
    kinds = len(KIND_CLASSES)
    yield tmp_path
    for name in set(FAMILIES) - set(BUILT_IN):
        del FAMILIES[name]
    while len(KIND_CLASSES) > kinds:
        forget(KIND_CLASSES[-1])
    for name in ("one_at_a_time", "rerun"):
        sys.modules.pop(name, None)


def prepare(place: str, command: Command):
    """Make the files that the commands of one page name and no other does."""
    if place in ("data.md", "tokenize"):
        write_texts()
    elif place == "add-an-instruction.md":
        runpy.run_path("use.py")
        Path("job.toml").write_text(EMULATED.replace("ranks = 3", "ranks = 2"))
    elif place == "getting-started.md":
        (model,), (job,) = (blocks("docs/getting-started.md", language) for language in ("python", "toml"))
        job = job.replace("checkpoint_every = 20", "checkpoint_every = 1")  # as few steps are trained here
        for name, text in (("my_model.py", model), ("my_job.toml", job), ("my_text.txt", "Some text. " * 1000)):
            Path(name).write_text(text)
    elif place in ("compare.md", "compare"):
        for name in ("fault_trace.json", "p3-trace.csv"):
            Path(name).write_bytes(Path("events.csv").read_bytes())
        Path("job.toml").write_text(
            EMULATED.replace("pipelines = 2", "pipelines = 3").replace("ranks = 3", "ranks = 2")
        )
    elif place in ("advise.md", "advise"):
        Path("fault_trace.json").write_bytes(Path("events.csv").read_bytes())
        shutil.copy(ROOT / "benchmarks/paper/gpt3_medium.toml", "job.toml")
    elif place in ("hugging-face.md", "import-hf"):
        assert command("export-hf", "runs/mine/checkpoints/step-00000001", "-o", "models/Llama-3.1-8B").status == 0
    elif place == "import-megatron":
        Path("megatron").mkdir()
        outcome = command("export-megatron", "runs/mine/checkpoints/step-00000001", "-o", "megatron/checkpoints")
        assert outcome.status == 0, outcome.err
        shutil.rmtree("runs/mine")
    elif place == "train":
        shutil.rmtree("runs/mine")
    elif place in ("profile.md", "plan", "view"):
        assert command("plan", "job.toml", "--failures", "1", "--library", "plans").status == 0
    if place in ("plan", "plan.md", "read-a-timeline.md"):
        for name in ("measured.json", "profile.json"):
            Path(name).write_text("{}")
    if place in ("profile", "profile.md", "simulate"):
        write_traces(Path("traces/iteration_4"))
    if place == "verify":
        assert command("plan", "job.toml", "-o", "plan.json").status == 0


def write_texts():
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2, "[UNK]": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    Path("models/llama").mkdir()
    for path in ("tokenizer.json", "models/llama/tokenizer.json"):
        tokenizer.save(path)
    Path("models/llama/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    line = json.dumps({"text": "a b"}) + "\n"
    Path("corpus.jsonl").write_text(line)
    Path("more.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    Path("book.txt").write_text("a b")


@pytest.mark.process
@pytest.mark.parametrize("place", RUN)
def test_commands_of_a_page_run_in_order(scene, command, place):
    prepare(place, command)
    for text in PRINTED[place]:
        if reason(text) is not None:
            continue
        first, *words = shortened(text)
        if first == "torchrun":
            run_torchrun(words, scene)
            continue
        if first == "python":
            assert words[:2] == ["-m", "recycle.job.reference"], text
            continue
        outcome = command(shlex.join(words))
        assert outcome.status == 0, f"{text}\nran as: recycle {shlex.join(words)}\n{outcome.err}"


@pytest.mark.parametrize("place", PRINTED)
def test_the_options_of_every_command_exist(place):
    for text in PRINTED[place]:
        words = words_of(text)
        if "recycle" not in words or "=$PWD" in text:
            continue
        name, *arguments = words[words.index("recycle") + 1 :]
        numbers = ["1" if word in ("N", "SECONDS") else word for word in arguments]
        parse = command_of(name).make_context
        if "--help-faults" in numbers:
            with pytest.raises(typer.Exit):
                parse(name, numbers)
            continue
        parse(name, numbers)


def test_all_commands_are_printed_and_all_reasons_used():
    every = [command for commands in PRINTED.values() for command in commands]
    assert {words_of(command)[1] for command in every if command.startswith("recycle ")} == set(COMMANDS)
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in every)] == []


def benchmarks_printed() -> list[str]:
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
    found = {
        " ".join(match.split()) for text in texts for match in re.findall(r"`(python [^`]*benchmarks[^`]*)`", text)
    }
    return sorted(command.removesuffix(" …") for command in found)


@pytest.mark.slow
@pytest.mark.parametrize("text", benchmarks_printed())
def test_the_options_of_every_printed_benchmark_exist(text, monkeypatch):
    class Parsed(Exception):
        """Ends a benchmark when its options are read."""

    parse_args = argparse.ArgumentParser.parse_args

    def parse(parser, *arguments):
        parse_args(parser)
        raise Parsed

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    values = {"KIND": "gpt", "D": "3", "N": "1", "DN": "1"}
    _, *words = (values.get(word, word) for word in shlex.split(text.replace("-W ignore ", "")))
    path = Path(words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0])
    if path.with_suffix("").is_dir():
        path = path.with_suffix("") / "__main__.py"
    if "parse_args" not in path.read_text():
        assert words[2 if words[0] == "-m" else 1 :] == []
        return
    monkeypatch.setattr(sys, "argv", [str(path), *words[2 if words[0] == "-m" else 1 :]])
    with pytest.raises(Parsed):
        runpy.run_path(str(path), run_name="__main__")
