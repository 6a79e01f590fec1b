"""What evaluations read: by default the part of the data that is not trained on, where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recycle import Job, JobError
from recycle.exec.data.batches import Batches
from recycle.exec.data.loading import load_batches, load_evaluation
from recycle.exec.launch.checks import check_request
from tests.exec.data.test_gpt_dataset import SEQUENCE, SIZE, D, M, toml
from tests.exec.megatron_data import dealt_out, training_samples, written

SHAPE = f"[shape]\npipelines = {D}\nranks = 2\nmicro_batches = {M}\n"
BATCHES, END = 3, 99
SAMPLES = BATCHES * D * M * SIZE


def all_rows(batches: Batches, count: int = 2) -> torch.Tensor:
    return torch.cat([batches.batch(i, number)["tokens"] for i in range(count) for number in range(D * M)])


@pytest.mark.parametrize("named", [False, True])
def test_of_a_gpt_dataset_it_is_the_validation_part_of_the_split(tmp_path: Path, named: bool) -> None:
    prefixes = [str(written(tmp_path / name, 2000, number)) for number, name in enumerate("ab")]
    keys: dict[str, Any] = {"paths": prefixes, "weights": [0.3, 0.7], "split": "90,5,5", "seed": 7}
    text = toml(**(keys if not named else {"path": prefixes[0]})) + f"\n[eval]\nevery = 2\nbatches = {BATCHES}\n"
    if named:
        listed = ", ".join(f"{key} = {value!r}" for key, value in keys.items()).replace("'", '"')
        text += f'data = {{kind = "gpt-dataset", {listed}}}\n'
    ours = load_evaluation(Job.from_toml(text))
    theirs = training_samples(prefixes, [0.3, 0.7], "90,5,5", 7, SEQUENCE, SAMPLES, END, part=1)
    for (batch, micro_batch), samples in dealt_out(D, M, SIZE, BATCHES).items():
        found = ours.batch(batch, micro_batch)
        for name in ("tokens", "labels"):
            assert torch.equal(found[name], torch.stack([theirs[sample][name] for sample in samples]))


@pytest.mark.parametrize("kind", ["text", "megatron"])
def test_of_other_kinds_it_is_the_training_data_in_another_order(tmp_path: Path, kind: str) -> None:
    data = f'[data]\nkind = "{kind}"\nmicro_batch_size = 2\nseed = 4\n'
    if kind == "megatron":
        data += f'path = "{written(tmp_path / "a", 400, 0)}"\n'
    job = Job.from_toml(f"{SHAPE}[model]\nsequence = 8\n{data}[eval]\nevery = 1\n")
    ours, trained_on = load_evaluation(job), load_batches(job)
    assert ours.digest == trained_on.digest
    assert not torch.equal(all_rows(ours), all_rows(trained_on))
    named = Job.from_toml(f"{SHAPE}[model]\nsequence = 8\n{data}[eval]\nevery = 1\ndata = {data_as_table(data)}\n")
    assert torch.equal(all_rows(load_evaluation(named)), all_rows(trained_on))


def data_as_table(data: str) -> str:
    return "{" + ", ".join(line for line in data.splitlines()[1:] if "size" not in line) + "}"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("every = -1", r"\[eval\] every: expected `int` >= 0"),
        ("batches = 0", r"\[eval\] batches: expected `int` >= 1"),
        ("often = 1", r"\[eval\] often: there is no such key; known are every, "),
        ('every = 1\ndata = {kind = "megatron"}', r'\[eval\]: \[data\] path: kind = "megatron" needs the path'),
        (
            'every = 1\ndata = {kind = "gpt-dataset", path = "a", split = "1"}',
            '"1" gives validation, the second of them, nothing',
        ),
        ("every = 1\ndata = {micro_batch_size = 3}", r"\[eval\] data.micro_batch_size: 3, but stages hand on 1 rows"),
        ('every = 1\ndata = {provider = "nowhere"}', r"\[eval\] data.provider"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_line(lines: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        Job.from_toml(f"{SHAPE}[eval]\n{lines}\n")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('path = "nowhere.txt"', r"\[eval\]: \[data\] path: nowhere.txt cannot be read"),
        ('kind = "megatron", path = "nowhere"', r"\[eval\]: \[data\] path: nowhere.idx cannot be read"),
        ('provider = "json:nothing"', r'\[eval\] data.provider: json has no "nothing"'),
    ],
)
def test_data_that_cannot_be_read_are_refused_before_a_process_starts(lines: str, says: str) -> None:
    job = Job.from_toml(f"{SHAPE}[model]\nlayers = 2\n[eval]\nevery = 1\ndata = {{{lines}}}\n")
    with pytest.raises(JobError, match=says):
        check_request(job, 3, [], frozenset())
