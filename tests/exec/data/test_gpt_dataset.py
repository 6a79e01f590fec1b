"""Samples of megatron-core's GPTDataset, in the order of Megatron-LM's loop; and the data of evaluations."""

import multiprocessing
from collections.abc import Sequence

import pytest
import torch

from recycle import Job, JobError, RunError
from recycle.exec.data.batches import Batches
from recycle.exec.data.gpt_dataset import GptDatasetBatches
from recycle.exec.data.loading import load_batches, load_evaluation
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.model.tensor_ranks import ensure_parallel_state
from recycle.exec.transport.base import TransportError
from tests.exec.megatron_data import dealt_out, training_samples, written
from tests.exec.runs import require_startable

D, M, SIZE, SEQUENCE, STEPS, END = 2, 3, 2, 8, 5, 99
SAMPLES = STEPS * D * M * SIZE


SHAPE = f"[shape]\npipelines = {D}\nranks = 2\nmicro_batches = {M}\n"


def toml(**data) -> str:
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in data.items()]
    return (
        f"{SHAPE}[model]\nvocabulary = 100\nsequence = {SEQUENCE}\n"
        f"[train]\nsteps = {STEPS}\nwarmup = 0\n"
        f'[data]\nkind = "gpt-dataset"\nmicro_batch_size = {SIZE}\n' + "\n".join(lines)
    ).replace("'", '"')


def batches(**data) -> GptDatasetBatches:
    opened = load_batches(Job.from_toml(toml(**data)))
    assert isinstance(opened, GptDatasetBatches)
    return opened


def require_samples(ours: Batches, theirs, names: Sequence[str], steps: int = STEPS):
    """Each micro-batch has megatron-core's samples that Megatron-LM's ranks draw."""
    for (iteration, micro_batch), samples in dealt_out(D, M, SIZE, steps).items():
        batch = ours.batch(iteration, micro_batch)
        assert list(batch) == list(names)
        for name in names:
            assert torch.equal(batch[name], torch.stack([theirs[sample][name] for sample in samples]))


@pytest.mark.parametrize(
    ("names", "weights", "split", "seed"),
    [
        (["a"], None, "969,30,1", 1234),
        (["a"], None, "1", 0),
        (["a", "b"], [0.3, 0.7], "90,5,5", 0),
        (["a", "b"], [3.0, 1.0], "1", 1234),
    ],
)
def test_every_micro_batch_is_megatron_lms(tmp_path, names, weights, split, seed):
    prefixes = [str(written(tmp_path / name, 2000, number)) for number, name in enumerate(names)]
    keys = {"path": prefixes[0]} if len(names) == 1 else {"paths": prefixes, "weights": weights}
    theirs = training_samples(prefixes, weights, split, seed, SEQUENCE, SAMPLES, END)
    require_samples(batches(**keys, split=split, seed=seed), theirs, ("tokens", "labels"))


def test_masks_and_positions_are_megatron_cores(tmp_path):
    prefix = str(written(tmp_path / "a", 40, 0))
    flags = {"mask_loss": True, "reset_positions": True, "reset_attention": True}
    ours = batches(path=prefix, split="1", end_of_document=END, **flags)
    theirs = training_samples([prefix], None, "1", 0, SEQUENCE, SAMPLES, END, **flags)
    require_samples(ours, theirs, ("tokens", "labels", "loss_mask", "position_ids", "attention_mask"))
    assert sum(int((ours.batch(step, 0)["loss_mask"] == 0).sum()) for step in range(STEPS)) > 0
    batch = ours.batch(0, 0)
    documents = (batch["tokens"] == END).cumsum(1) - (batch["tokens"] == END).long()
    attended = (documents[:, None, :, None] == documents[:, None, None]).tril()
    assert torch.equal(batch["attention_mask"], ~attended)


def test_building_a_blend_keeps_torchs_process_groups(tmp_path):
    """In a worker the tensor group exists before the data are loaded, and torch must know it when a peer dies."""
    group, initialized = TensorGroup(1, 2), torch.distributed.is_initialized()

    def fail(*_):
        raise TransportError("a peer is gone")

    group.exchange = fail
    batches(paths=[str(written(tmp_path / name, 40, 0)) for name in "ab"], weights=[0.3, 0.7], split="1")
    assert torch.distributed.is_initialized() == initialized
    ensure_parallel_state()
    with pytest.raises(TransportError):
        torch.distributed.all_reduce(torch.ones(1), group=group)


@pytest.mark.process
def test_processes_share_the_cached_index(tmp_path):
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


def test_lock_of_the_cache_follows_no_link(tmp_path):
    prefix = str(written(tmp_path / "a", 40, 0))
    (tmp_path / "cache").mkdir()
    (tmp_path / "important").write_text("important")
    (tmp_path / "cache" / ".lock").symlink_to(tmp_path / "important")
    with pytest.raises(JobError, match=r"\[data\] cache: .*\.lock cannot be opened"):
        batches(path=prefix)
    assert (tmp_path / "important").read_text() == "important"


def test_digest_depends_on_the_order(tmp_path):
    prefix, other = (str(written(tmp_path / name, 2000, number)) for number, name in enumerate("ab"))
    keys = [
        *({"path": prefix}, {"path": other}, {"path": prefix, "seed": 1}, {"path": prefix, "samples": 500}),
        *({"path": prefix, "split": "1"}, {"paths": [prefix, other], "weights": [1.0, 1.0]}),
        *({"path": prefix, "end_of_document": END, key: True} for key in ("mask_loss", "reset_attention")),
    ]
    digests = [batches(**each).digest for each in keys]
    assert len(set(digests)) == len(keys)
    assert batches(path=prefix).digest == digests[0]


def test_run_longer_than_its_order_is_told_the_key_to_set(tmp_path):
    ours = batches(path=str(written(tmp_path / "a", 40, 0)))
    with pytest.raises(RunError, match=r"\[data\] samples: iteration 500 needs sample 6001 of \d+"):
        ours.batch(500, 0)


EVAL = "[eval]\nevery = 1\ndata = "


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('[data]\nkind = "gpt-dataset"', r"\[data\] path: give the path of a .bin and .idx file without the suffix"),
        ('[data]\nkind = "gpt-dataset"\npath = "a"\npaths = ["b"]', r"\[data\] path: give the path"),
        ('[data]\nkind = "gpt-dataset"\npaths = ["a", "b"]\nweights = [1.0]', r"\[data\] weights: 1 for 2 paths"),
        ('[data]\nkind = "gpt-dataset"\npath = "a"\nmask_loss = true', r"\[data\] mask_loss: needs end_of_document"),
        (
            '[data]\nkind = "gpt-dataset"\npath = "a"\nsplit = "0,1"',
            r'\[data\] split: "0,1" gives no share to training',
        ),
        ('[data]\nkind = "gpt-dataset"\npath = "a"\nsplit = "much"', r"\[data\] split: "),
        ('[data]\nkind = "megatron"\npath = "a"\nsamples = 3', r'\[data\] samples: needs kind = "gpt-dataset"'),
        ("[eval]\nevery = -1", r"\[eval\] every: expected `int` >= 0"),
        ("[eval]\nbatches = 0", r"\[eval\] batches: expected `int` >= 1"),
        (EVAL + '{kind = "megatron"}', r'\[eval\]: \[data\] path: kind = "megatron" needs the path'),
        (EVAL + '{kind = "gpt-dataset", path = "a", split = "1"}', '"1" gives no share to validation'),
        (EVAL + "{micro_batch_size = 3}", r"\[eval\] data.micro_batch_size: 3, but stages pass on 1 rows"),
        (EVAL + '{provider = "nowhere"}', r"\[eval\] data.provider"),
        (EVAL + '{path = "nowhere.txt"}', r"\[eval\]: \[data\] path: nowhere.txt cannot be read"),
        (EVAL + '{kind = "megatron", path = "nowhere"}', r"\[eval\]: \[data\] path: nowhere.idx cannot be read"),
        (EVAL + '{provider = "json:nothing"}', r'\[eval\] data.provider: json has no "nothing"'),
    ],
)
def test_unusable_keys_are_refused_before_a_process_starts(lines, message):
    with pytest.raises(JobError, match=message):
        require_startable(Job.from_toml(f"{SHAPE}[model]\nlayers = 2\n{lines}\n"), 3)


def test_unusable_files_are_one_clear_line(tmp_path):
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


EVALUATED = 3


@pytest.mark.parametrize("named", [False, True])
def test_evaluations_read_the_validation_part_of_a_gpt_dataset(tmp_path, named):
    prefixes = [str(written(tmp_path / name, 2000, number)) for number, name in enumerate("ab")]
    keys = {"paths": prefixes, "weights": [0.3, 0.7], "split": "90,5,5", "seed": 7}
    text = toml(**(keys if not named else {"path": prefixes[0]})) + f"\n[eval]\nevery = 2\nbatches = {EVALUATED}\n"
    if named:
        listed = ", ".join(f"{key} = {value!r}" for key, value in keys.items()).replace("'", '"')
        text += f'data = {{kind = "gpt-dataset", {listed}}}\n'
    ours = load_evaluation(Job.from_toml(text))
    samples = EVALUATED * D * M * SIZE
    theirs = training_samples(prefixes, [0.3, 0.7], "90,5,5", 7, SEQUENCE, samples, END, part=1)
    require_samples(ours, theirs, ("tokens", "labels"), EVALUATED)


@pytest.mark.parametrize("kind", ["text", "megatron"])
def test_evaluations_read_other_training_data_in_another_order(tmp_path, kind):
    keys = [f'kind = "{kind}"', "seed = 4"]
    if kind == "megatron":
        keys.append(f'path = "{written(tmp_path / "a", 400, 0)}"')
    data = "\n".join(["[data]", "micro_batch_size = 2", *keys])
    text = f"{SHAPE}[model]\nsequence = 8\n{data}\n[eval]\nevery = 1\n"

    def rows(read):
        return torch.cat([read.batch(i, number)["tokens"] for i in range(2) for number in range(D * M)])

    trained, ours = load_batches(Job.from_toml(text)), load_evaluation(Job.from_toml(text))
    assert ours.digest == trained.digest
    assert not torch.equal(rows(ours), rows(trained))
    named = load_evaluation(Job.from_toml(f"{text}data = {{{', '.join(keys)}}}\n"))
    assert torch.equal(rows(named), rows(trained))
