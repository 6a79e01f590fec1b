"""Samples of megatron-core's GPTDataset, those that Megatron-LM's own loop takes; and what evaluations read."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from recycle import Job, JobError, RunError
from recycle.exec.data.batches import Batches
from recycle.exec.data.gpt_dataset import GptDatasetBatches
from recycle.exec.data.loading import load_batches, load_evaluation
from recycle.exec.launch.checks import check_request
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.model.tensor_ranks import ensure_parallel_state
from recycle.exec.transport.base import TransportError
from tests.exec.megatron_data import dealt_out, training_samples, written

D, M, SIZE, SEQUENCE, STEPS, END = 2, 3, 2, 8, 5, 99
SAMPLES = STEPS * D * M * SIZE


def toml(**data: Any) -> str:
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in data.items()]
    return (
        f"[shape]\npipelines = {D}\nranks = 2\nmicro_batches = {M}\n[model]\nvocabulary = 100\nsequence = {SEQUENCE}\n"
        f"[train]\nsteps = {STEPS}\nwarmup = 0\n"
        f'[data]\nkind = "gpt-dataset"\nmicro_batch_size = {SIZE}\n' + "\n".join(lines)
    ).replace("'", '"')


def batches(**data: Any) -> GptDatasetBatches:
    found = load_batches(Job.from_toml(toml(**data)))
    assert isinstance(found, GptDatasetBatches)
    return found


@pytest.mark.parametrize("seed", [0, 1234])
@pytest.mark.parametrize(
    ("names", "weights", "split"),
    [(["a"], None, "969,30,1"), (["a"], None, "1"), (["a", "b"], [0.3, 0.7], "90,5,5"), (["a", "b"], [3.0, 1.0], "1")],
)
def test_every_micro_batch_is_megatron_lms(
    tmp_path: Path, names: list[str], weights: list[float] | None, split: str, seed: int
) -> None:
    prefixes = [str(written(tmp_path / name, 2000, number)) for number, name in enumerate(names)]
    keys = {"path": prefixes[0]} if len(names) == 1 else {"paths": prefixes, "weights": weights}
    ours = batches(**keys, split=split, seed=seed)
    theirs = training_samples(prefixes, weights, split, seed, SEQUENCE, SAMPLES, END)
    for (iteration, micro_batch), samples in dealt_out(D, M, SIZE, STEPS).items():
        found = ours.batch(iteration, micro_batch)
        assert set(found) == {"tokens", "labels"}
        for name in found:
            assert torch.equal(found[name], torch.stack([theirs[sample][name] for sample in samples]))


def test_masks_and_positions_are_megatron_cores(tmp_path: Path) -> None:
    prefix = str(written(tmp_path / "a", 40, 0))
    ours = batches(path=prefix, split="1", end_of_document=END, mask_loss=True, reset_positions=True)
    theirs = training_samples([prefix], None, "1", 0, SEQUENCE, SAMPLES, END, mask_loss=True, reset_positions=True)
    seen = 0
    for (iteration, micro_batch), samples in dealt_out(D, M, SIZE, STEPS).items():
        found = ours.batch(iteration, micro_batch)
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert torch.equal(found[name], torch.stack([theirs[sample][name] for sample in samples]))
        assert torch.equal(found["loss_mask"] == 0, found["tokens"] == END)
        seen += int((found["tokens"] == END).sum())
    assert seen > 10


def test_building_a_blend_leaves_torchs_process_groups_as_they_are(tmp_path: Path) -> None:
    """In a worker the tensor group exists before its data are loaded, and torch must know it when a peer dies."""
    group, initialized = TensorGroup(1, 2), torch.distributed.is_initialized()

    def fail(_: torch.Tensor) -> Any:
        raise TransportError("a peer is gone")

    group.exchange = fail
    batches(paths=[str(written(tmp_path / name, 40, 0)) for name in "ab"], weights=[0.3, 0.7], split="1")
    assert torch.distributed.is_initialized() == initialized
    ensure_parallel_state()
    with pytest.raises(TransportError):
        torch.distributed.all_reduce(torch.ones(1), group=group)


@pytest.mark.process
def test_the_index_is_kept_and_found_by_other_processes_at_once(tmp_path: Path) -> None:
    prefix = str(written(tmp_path / "a", 40, 0))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        first = pool.map(_tokens, [toml(path=prefix, cache=str(tmp_path / "kept"))] * 4)
    assert all(tokens == first[0] for tokens in first)
    indices = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").glob("*.npy")}
    assert len(indices) == 3
    assert _tokens(toml(path=prefix, cache=str(tmp_path / "kept"))) == first[0]
    assert {path: path.stat().st_mtime_ns for path in indices} == indices


def _tokens(job: str) -> list[list[int]]:
    return load_batches(Job.from_toml(job)).batch(1, 2)["tokens"].tolist()


def test_a_link_in_the_place_of_the_caches_lock_is_not_followed(tmp_path: Path) -> None:
    prefix = str(written(tmp_path / "a", 40, 0))
    (tmp_path / "cache").mkdir()
    (tmp_path / "important").write_text("important")
    (tmp_path / "cache" / ".lock").symlink_to(tmp_path / "important")
    with pytest.raises(JobError, match=r"\[data\] cache: .*\.lock cannot be opened"):
        batches(path=prefix)
    assert (tmp_path / "important").read_text() == "important"


def test_the_digest_tells_orders_apart(tmp_path: Path) -> None:
    prefix, other = (str(written(tmp_path / name, 2000, number)) for number, name in enumerate("ab"))
    keys: list[dict[str, Any]] = [
        *({"path": prefix}, {"path": other}, {"path": prefix, "seed": 1}, {"path": prefix, "samples": 500}),
        *({"path": prefix, "split": "1"}, {"paths": [prefix, other], "weights": [1.0, 1.0]}),
        {"path": prefix, "end_of_document": END, "mask_loss": True},
    ]
    digests = [batches(**each).digest for each in keys]
    assert len(set(digests)) == len(keys)
    assert batches(path=prefix).digest == digests[0]


def test_a_run_longer_than_the_order_was_made_for_is_told_what_to_state(tmp_path: Path) -> None:
    ours = batches(path=str(written(tmp_path / "a", 40, 0)))
    with pytest.raises(RunError, match=r"\[data\] samples: iteration 500 needs sample 6001 of \d+; state as many"):
        ours.batch(500, 0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"\[data\] path: give the path of a .bin and .idx file without the suffix, or several as paths"),
        ({"path": "a", "paths": ["b"]}, r"\[data\] path: give the path"),
        ({"paths": ["a", "b"], "weights": [1.0]}, r"\[data\] weights: 1 for 2 paths"),
        ({"path": "a", "mask_loss": True}, r"\[data\] mask_loss: needs end_of_document"),
        ({"path": "a", "split": "0,1"}, r'\[data\] split: "0,1" gives no share to training, the first part'),
        ({"path": "a", "split": "much"}, r"\[data\] split: "),
        ({"path": "a", "kind": "megatron", "samples": 3}, r'\[data\] samples: needs kind = "gpt-dataset"'),
    ],
)
def test_keys_that_do_not_fit_are_named(keys: dict[str, Any], message: str) -> None:
    text = toml(**keys)
    if "kind" in keys:
        text = text.replace('kind = "gpt-dataset"\n', "", 1)
    with pytest.raises(JobError, match=message):
        Job.from_toml(text)


def test_files_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    prefix = str(written(tmp_path / "a", 40, 0))
    (tmp_path / "file").touch()
    for keys, message in (
        ({"path": str(tmp_path / "none")}, r"\[data\] path: .*none\.idx cannot be read"),
        ({"path": prefix, "split": "1,999"}, r'\[data\] split: "1,999" leaves no token of .*a to train on'),
        ({"path": prefix, "cache": str(tmp_path / "file" / "x")}, r"\[data\] cache: .* cannot be written \(Not a dir"),
        ({"paths": [prefix, prefix], "samples": 10**6}, r"hold \d+ samples, the run needs 1000000; with weights"),
    ):
        with pytest.raises(JobError, match=message) as error:
            batches(**keys)
        assert "\n" not in str(error.value)
    small = Job.from_toml(toml(path=prefix).replace("vocabulary = 100", "vocabulary = 99"))
    with pytest.raises(JobError, match=r"\[model\] vocabulary: 99, but token \d+ of .*a\.bin is 99"):
        load_batches(small).require_vocabulary()


SHAPE = f"[shape]\npipelines = {D}\nranks = 2\nmicro_batches = {M}\n"
BATCHES, END_OF_DOCUMENT = 3, 99
EVALUATED_SAMPLES = BATCHES * D * M * SIZE


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
    theirs = training_samples(prefixes, [0.3, 0.7], "90,5,5", 7, SEQUENCE, EVALUATED_SAMPLES, END_OF_DOCUMENT, part=1)
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
        ("often = 1", r"\[eval\] often: unknown key; known are every, "),
        ('every = 1\ndata = {kind = "megatron"}', r'\[eval\]: \[data\] path: kind = "megatron" needs the path'),
        (
            'every = 1\ndata = {kind = "gpt-dataset", path = "a", split = "1"}',
            '"1" gives no share to validation, the second part',
        ),
        ("every = 1\ndata = {micro_batch_size = 3}", r"\[eval\] data.micro_batch_size: 3, but stages pass on 1 rows"),
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
