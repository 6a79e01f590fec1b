"""The examples as users run them: notebooks, demo, jobs with custom code or data, loops of Megatron and torch.

Killed workers return, and the losses equal the losses of the run without failures, to the bit.
"""

import ast
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from recycle import Job
from recycle.exec import run
from recycle.ir.families import interleaved, zb_h1
from tests import ROOT
from tests.cli.command import Command
from tests.exec.runs import lines_of
from tests.warm import outputs_of_scripts, run_torchrun

EXAMPLES = Path("examples")


def run_cells(name: str) -> tuple[dict[str, Any], list[Any]]:
    """The names that are defined in the end, and what the last line of each cell of code gives, if it is a value."""
    names = {}
    shown = []
    cells = json.loads((EXAMPLES / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "a notebook is kept without its outputs"
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                shown.append(value)
    return names, shown


def test_a_schedule_is_written_checked_and_drawn(tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names, shown = run_cells("write_a_schedule")
    assert list(shown[0]) == []
    assert all(value._repr_svg_().startswith("<svg") for value in shown[1:])
    assert "makespan 10.0 period 9.0" in capsys.readouterr().out
    assert {finding.rule for finding in names["findings"] if finding.severity == "error"} == {"deadlock"}
    assert [row[:2] for row in names["rows"]] == [("gpipe", 33.0), ("1f1b", 33.0), ("zb-h1", 27.0), ("zb-h2", 24.0)]
    assert (tmp_path / "mine.json").is_file()


@pytest.mark.search
def test_failures_are_planned_for(capsys):
    names, shown = run_cells("plan_for_failures")
    assert names["healthy"].period < 27
    assert (names["adaptive"].period, names["adaptive"].gap) == (27, 0)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("at most")] == [
        f"at most {limit} activations: period {period}, gap 0.0%"
        for limit, period in ((4, 29), (5, 28), (6, 27), (8, 27))
    ]
    assert shown[-1]._repr_svg_().count("rerouted") > 0


@pytest.mark.process
def test_training_goes_through_a_failure(capsys):
    names, shown = run_cells("train_through_one")
    assert names["struck"].losses == names["calm"].losses
    assert "worker 1.1 re-joined at step 8" in capsys.readouterr().out
    assert "failed" in shown[-1]._repr_svg_()


@pytest.mark.process
@pytest.mark.parametrize(("name", "family"), [("own_model", zb_h1), ("megatron_data", interleaved)])
def test_a_job_trains_to_the_same_bits_through_a_failure(tmp_path, capsys, name, family):
    command, file = Command(capsys), EXAMPLES / name / "job.toml"
    if name == "megatron_data":  # a token file that megatron-core's builder writes
        file = Path(shutil.copy(file, tmp_path))
        missing = command("train", file, "--steps", "6", "--run", tmp_path / "none")
        assert missing.refused("stdlib.idx cannot be read (No such file or directory)")
        write = [f"examples/{name}/write_dataset.py", "--prefix", str(tmp_path / "stdlib"), "--documents", "5"]
        assert outputs_of_scripts(write, ROOT).startswith("5 documents in ")
    faults = "--fault kill:1.1@2 --fault rejoin:1.1@4"
    struck = command("train", file, "--steps", "6", "--run", tmp_path / "struck", faults)
    assert struck.status == 0, struck.err
    lines = lines_of(tmp_path / "struck", "metrics")
    live = [line["live_workers"] for line in lines]
    assert [workers - live[0] for workers in live] == [0, 0, -1, -1, 0, 0]
    job = Job.load(file)
    healthy = run(family(job.shape), job, steps=6).losses
    assert [line["loss"] for line in lines] == healthy
    assert healthy[-1] < healthy[0]


@pytest.mark.process
def test_the_demo_compares_both_runs_and_writes_the_timeline(tmp_path):
    command = ["examples/tiny_gpt/demo.py", "--run", str(tmp_path / "demo"), "--steps", "6"]
    printed = outputs_of_scripts(command, ROOT)
    assert "losses identical to the last bit: yes" in printed
    assert "optimizer state of all workers identical to the last bit: yes" in printed
    table = re.findall(r"^ +(\d+)  ([\d.]+) +([\d.]+) +(\d)$", printed, flags=re.MULTILINE)
    assert [int(step) for step, *_ in table] == list(range(6))
    assert all(loss == other for _, loss, other, _ in table)
    assert [live for *_, live in table] == ["6"] * 2 + ["5"] * 2 + ["6"] * 2
    page = (tmp_path / "demo" / "timeline.html").read_text()
    assert "failed" in page
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?://', page)


def losses(command: str) -> list[float]:
    """What Megatron's training script prints for each step, in two steps of four micro-batches."""
    printed = run_torchrun([*shlex.split(command, comments=True)[1:], "--steps", "2", "--micro-batches", "4"], ROOT)
    return [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step ")]


@pytest.mark.process
def test_every_schedule_of_the_docstring_of_megatrons_loop_trains_the_same_model():
    text = (EXAMPLES / "megatron_loop" / "train.py").read_text()
    zero_bubble, two_replicas, on_a_v, own = map(losses, re.findall(r"^    (torchrun .*)$", text, flags=re.MULTILINE))
    assert len(own) == len(two_replicas) == 2
    assert own[1] < own[0]
    assert zero_bubble == own  # to the bit
    assert on_a_v == pytest.approx(own, rel=1e-6)
    assert two_replicas[1] < two_replicas[0]


@pytest.mark.process
def test_torch_runs_an_exported_schedule_to_the_gradients_of_the_unsplit_model():
    script = ROOT / "examples" / "torch_pipelining" / "train.py"
    printed = run_torchrun(["--nproc-per-node", "2", str(script), "--chunks", "2", "--schedule", "zb-v"], script.parent)
    assert re.findall(r"rank \d: gradients of stages \[\d, \d\] equal ", printed) == [
        "rank 0: gradients of stages [0, 3] equal ",
        "rank 1: gradients of stages [1, 2] equal ",
    ]
