"""Job: one TOML file, errors that name file and key, defaults that resolve and read back."""

import msgspec
import pytest

from recycle import Job, JobError, Profile
from recycle.job import price
from recycle.job.pricing import parse_bytes
from recycle.job.reference import reference_page
from tests import DOCS
from tests.jobs import varied

SHAPE = "[shape]\npipelines = 3\nranks = 4\nmicro_batches = 6\n"


def test_times_and_memory_reach_the_profile_and_the_limits():
    job = Job.from_toml(
        SHAPE + "[times]\nforward = [1, 2, 3, 4]\nlink = 0.5\nstep = 2\n"
        "[memory]\nlimit = [4, 3, 2, 1]\nweight_stash = 0.25\n"
    )
    profile = job.profile()
    assert profile.forward == [1.0, 2.0, 3.0, 4.0]
    assert (profile.latency, profile.step, profile.weight_stash) == (0.5, 2.0, 0.25)
    assert job.activation_limits() == [4.0, 3.0, 2.0, 1.0]
    assert Job.from_toml(SHAPE + "[memory]\nlimit = 4\n").activation_limits() == [4.0] * 4


def test_a_limit_in_bytes_becomes_activations_by_the_profile(tmp_path):
    Profile(activation=[100.0, 50.0, 50.0, 50.0], static=[400.0, 0.0, 0.0, 0.0]).save(tmp_path / "profile.json")
    file = tmp_path / "job.toml"
    file.write_text(SHAPE + '[times]\nprofile = "profile.json"\n[memory]\nlimit = "1000 B"\n')
    job = Job.load(file)
    assert job.activation_limits() == [6.0, 20.0, 20.0, 20.0]


def test_a_limit_in_bytes_works_with_times_and_bytes_written_by_hand():
    limit = SHAPE + '[memory]\nlimit = "20 GiB"\n'
    assert Job.from_toml(limit + 'activation = "2 GiB"\n').activation_limits() == [10.0] * 4
    job = Job.from_toml(limit + 'activation = ["2 GiB", "1 GiB", "1 GB", "4 GiB"]\nstatic = "10 GiB"\n')
    assert job.activation_limits() == [5.0, 10.0, 10.0, 2.0]
    assert job.profile().static == 10 * 2**30
    chunks = Job.from_toml(
        SHAPE.replace("ranks = 4", "ranks = 2\nchunks = 2") + '[memory]\nlimit = "9 B"\n'
        'activation = ["1 B", "1 B", "2 B", "1 B"]\nstatic = ["1 B", "2 B", "0 B", "3 B"]\n'
    )
    assert chunks.activation_limits() == [4.0, 4.0]
    assert Job.from_toml(job.to_toml()) == job


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[shape]\nranks = 4\nmicro_batches = 6\n", r"\[shape\].*pipelines"),
        ("[shape]\npipelines = 0\nranks = 4\nmicro_batches = 6\n", r"\[shape\] pipelines: .*>= 1"),
        (SHAPE.replace("ranks = 4", 'ranks = "two"'), r"\[shape\] ranks: expected `int`, got `str`"),
        (SHAPE + "rank = 3\n", r"""\[shape\] rank: unknown key; did you mean "ranks"\?$"""),
        (SHAPE + "[modell]\n", r"""\[modell\]: unknown section; did you mean "model"\?$"""),
        (SHAPE + "[eval]\nxyz = 1\n", r"\[eval\] xyz: unknown key; known are every, batches, "),
        ("[times]\nforward = 1\n", r"\[shape\]: is missing; write for example pipelines = 3, "),
        ('{"pipelines": 3}', "is JSON, but a job file is TOML"),
        (SHAPE + "[times]\nforward = [1, 2]\n", r"\[times\] forward: lists 2 stages, the shape has 4"),
        (SHAPE + "[times]\nbackward_input = -1\n", r"\[times\] backward_input: must be finite and at least 0"),
        (SHAPE + "[memory]\nlimit = 0\n", r"\[memory\] limit: .*must hold at least 1"),
        (SHAPE + "[memory]\nlimit = [1, 2]\n", r"\[memory\] limit: lists 2 ranks"),
        (SHAPE + '[memory]\nlimit = "20 GiB"\n', r"\[memory\] limit: bytes need .* \[memory\] activation"),
        (SHAPE + '[memory]\nactivation = "0 B"\n', r"\[memory\] activation: must be more than 0"),
        (SHAPE + '[memory]\nactivation = ["2 GiB"]\n', r"\[memory\] activation: lists 1 stages, the shape has 4"),
        (SHAPE + '[memory]\nstatic = "2 GiB"\n', r"\[memory\] static: needs activation"),
        (
            SHAPE + '[memory]\nactivation = "2 GiB"\n[times]\nprofile = "analytic"\n',
            r"\[memory\] activation: \[times\] profile also states it",
        ),
        (SHAPE + '[memory]\nlimit = "much"\n', r"'much' is not a size"),
        (
            SHAPE + '[memory]\noffload = "auto"\n',
            r"\[memory\] offload: .auto. needs host_bandwidth, the bytes",
        ),
        (SHAPE + '[memory]\nhost_bandwidth = "fast"\n', r"\[memory\] host_bandwidth: 'fast' is not a size"),
        (SHAPE + '[memory]\nhost_bandwidth = "0 B"\n', r"\[memory\] host_bandwidth: must be more than 0"),
        (SHAPE + "[memory]\nhost_bandwidth = 0.0\n", r"\[memory\] host_bandwidth.*> 0"),
        (
            SHAPE + '[memory]\noffload = "auto"\nhost_bandwidth = 1.0\n[planner]\nlayout = "elastic"\n',
            r'\[memory\] offload: "auto" needs \[planner\] layout = "fixed"',
        ),
        (
            SHAPE + '[memory]\noffload = "auto"\nhost_bandwidth = 1.0\n[model]\nrecompute = "full"\n',
            r'\[memory\] offload: "auto" has nothing to offload with \[model\] recompute = "full"',
        ),
        (SHAPE + "[model]\nhidden = 10\nheads = 4\n", r"\[model\] heads"),
        (
            SHAPE + '[model]\nkind = "llm"\n',
            r"""\[model\] kind: .*'llm'; write "emulated" or "gemma" or "gpt" or .*"qwen_moe"$""",
        ),
        (SHAPE + "[data]\nreset_attention = true\n", r'\[data\] reset_attention: needs kind = "gpt-dataset" or a prov'),
        (SHAPE + "[model]\nrotary_percent = 0.5\n", r'\[model\] rotary_percent: kind = "gpt" has learned positions'),
        (SHAPE + '[train]\ntrace = "few"\n', r"""\[train\] trace: .*'few'; write "all" or "off", or a number$"""),
        (SHAPE + "[integrity]\nevery = 30\n", r"every: 30 does not divide \[train\] checkpoint_every = 100"),
        (SHAPE + "[integrity]\nevery = 10\ndigests = 30\n", r"digests: 30 does not divide \[train\] checkpoint_every"),
        (
            "[shape]\npipelines = 1\nranks = 4\nmicro_batches = 6\n[integrity]\nevery = 5\n",
            r"\[integrity\] every: with 1 pipeline no worker has a peer that could run its work again; write 0",
        ),
        (
            "[shape]\npipelines = 1\nranks = 4\nmicro_batches = 6\n[integrity]\ndigests = 5\n",
            r"\[integrity\] digests: with 1 pipeline no worker has a peer to compare its state with; write 0",
        ),
        (SHAPE + "[membership]\nports = [5, 4]\n", r"\[membership\] ports: the first, 5, is above the last, 4"),
        (SHAPE + "[membership]\nports = [0, 4]\n", r"\[membership\] ports.*>= 1"),
        (SHAPE + "[logging]\nprometheus = 0\n", r"\[logging\] prometheus: 0 is not a port from 1 to 65535"),
        (SHAPE + '[logging]\nprometheus = "a/b:1"\n', r"\[logging\] prometheus: 'a/b:1' is not a port"),
        (SHAPE + '[logging]\notlp = "host:4318"\n', r"\[logging\] otlp: 'host:4318' is not the URL of a collector"),
        ("[shape\n", "not valid TOML"),
        ("shape = 3\n", r"\[shape\]: expected `object`, got `int`"),
        ("[shape]\npipelines = 1000000000\nranks = 4\nmicro_batches = 1\n", "too large"),
    ],
)
def test_invalid_job_is_refused_with_file_and_key(text, complaint):
    with pytest.raises(JobError, match=complaint) as error:
        Job.from_toml(text, "my.toml")
    assert str(error.value).startswith("my.toml: ")


def test_files_that_cannot_be_read_are_named(tmp_path):
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(JobError, match="cannot be read"):
            Job.load(path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match=r"is not UTF-8 text \(byte 0\)"):
        Job.load(tmp_path / "binary.toml")


def test_layers_divide_or_are_stated():
    assert Job.from_toml(SHAPE + "[model]\nlayers = 8\n").layers_per_stage() == [2, 2, 2, 2]
    assert Job.from_toml(SHAPE + "[model]\nlayers = 5\nsplit = [1, 2, 1, 1]\n").layers_per_stage() == [1, 2, 1, 1]
    with pytest.raises(JobError, match="5 layers do not divide over 4 stages"):
        Job.from_toml(SHAPE + "[model]\nlayers = 5\n").layers_per_stage()
    without = SHAPE + "[model]\nlayers = 5\nsplit = [2, 0, 2, 1]\n"
    assert price(Job.from_toml(without)).prices.forward == 1
    with pytest.raises(JobError, match="stage 1 has no layer"):
        Job.from_toml(without + '[times]\nprofile = "analytic"\n')


@pytest.mark.parametrize(("text", "size"), [("20 GiB", 20 * 2**30), ("512 MB", 512e6), ("1.5kB", None), ("8B", 8)])
def test_sizes_are_decimal_or_binary_by_their_unit(text, size):
    if size is None:
        with pytest.raises(JobError, match="is not a size"):
            parse_bytes(text, "--size")
    else:
        assert parse_bytes(text, "--size") == size


def test_the_reference_of_the_job_file_is_that_of_the_types():
    page = (DOCS / "reference" / "job.md").read_text()
    assert page == reference_page(), "write it again with: python -m recycle.job.reference docs/reference/job.md"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(msgspec.structs.fields(section.type)) for section in msgspec.structs.fields(Job))
    steps = next(row for row in rows if row.startswith("| `steps` | whole number ≥ 1 (iterations) | `30` |"))
    assert len(steps.split(" | ")) == 4


def test_automatic_limit_needs_a_profile_with_capacity(tmp_path):
    wants = '[times]\nprofile = "p.json"\n[memory]\nlimit = "auto"\n'
    (tmp_path / "job.toml").write_text(SHAPE + wants)
    Profile(activation=10.0, static=100.0, workspace=5.0).save(tmp_path / "p.json")
    with pytest.raises(JobError, match=r'\[memory\] limit: "auto" is the memory of the device, which this profile'):
        Job.load(tmp_path / "job.toml").activation_limits()
    Profile(activation=10.0, static=100.0, workspace=5.0, capacity=149.0).save(tmp_path / "p.json")
    assert Job.load(tmp_path / "job.toml").activation_limits() == [4.0] * 4
    with pytest.raises(JobError, match=r"\[memory\] limit: .* needs \[times\] profile"):
        Job.from_toml(SHAPE + '[memory]\nlimit = "auto"\n')


def test_an_automatic_split_leaves_the_last_stage_room_for_the_head():
    """A vocabulary of 50,000 and 12 layers of width 1024: the head costs four layers."""
    text = "[shape]\npipelines = 2\nranks = 4\nmicro_batches = 8\n[model]\nlayers = 12\nhidden = 1024\nheads = 16\n"
    text += 'sequence = 1024\nvocabulary = 50000\nsplit = "auto"\n'
    even = Job.from_toml(text)
    assert even.model.split == [3, 3, 3, 3]
    assert Job.from_toml(text.replace("layers = 12", "layers = 14")).model.split == [3, 4, 3, 4]
    head = Job.from_toml(text + '[times]\nprofile = "analytic"\n')
    assert head.model.split == [3, 4, 4, 1]
    slowest = [max(price(job).prices.forward) for job in (head, varied(head, model={"split": None}))]
    assert slowest[0] < 0.75 * slowest[1]
    with pytest.raises(JobError, match=r"\[model\] split: 3 layer\(s\) cannot be cut into 4 stages"):
        Job.from_toml(text.replace("layers = 12", "layers = 3"))
    shape = 'ranks = 2\nchunks = 2\nplacement = "loop"'
    loop = text.replace("ranks = 4", shape).replace("layers = 12", "layers = 10") + '[times]\nprofile = "analytic"\n'
    assert Job.from_toml(loop.replace('"loop"', '"auto"')).model.split == [3, 3, 3, 1]
    for placement in ("loop", "v"):
        job = price(Job.from_toml(loop.replace('"loop"', f'"{placement}"')))
        layers = [3 * time / price(head).prices.forward[0] for time in job.prices.forward]
        loads = [sum(layers[s] for s in job.shape.stages_of_rank(rank)) for rank in range(2)]
        assert max(loads) == pytest.approx(7, abs=0.01), "7.5 with the other split"
