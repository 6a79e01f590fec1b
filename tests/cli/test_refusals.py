"""Invalid input gives one line with its place and exit status 2, and leaves no file."""

from pathlib import Path

import pytest

from benchmarks import advice
from recycle import Link, Profile, Schedule, Shape
from recycle.ir.families import FAMILIES, one_f_one_b
from tests.hugging_face.written import write_model
from tests.tokens.tokenizers import WORDS, saved_tokenizer

SHAPE = "[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n"
EMULATED = f'{SHAPE}[planner]\nseconds = 1\n[model]\nkind = "emulated"\n[train]\nsteps = 6\n'
STILL = "[times]\nforward = 0\nbackward_input = 0\nbackward_weight = 0\n"
PLAN = one_f_one_b(Shape(1, 2, 2)).dumps()
TEXTS = {
    "job.toml": EMULATED,
    "v.toml": EMULATED.replace("ranks = 2", 'ranks = 2\nchunks = 2\nplacement = "v"'),
    "wide.toml": EMULATED.replace("ranks = 2", "ranks = 2\ntensor_parallel = 2"),
    "still.toml": SHAPE + STILL,
    "sharded.toml": f"{SHAPE}[train]\nsharded_optimizer = true\n",
    "many.toml": "[shape]\npipelines = 'many'\n",
    "advice.toml": advice.JOB,
    "plan.json": PLAN,
    "cut.json": PLAN[:120],
    "trace.csv": "3600000,remove,n1\n7200000,add,n1\n9000000,remove,n2\n86400000,add,n2\n",
    "text.txt": WORDS,
    "corpus.idx": "kept",
}
SCHEDULES = {
    "other.json": one_f_one_b(Shape(3, 2, 2)),
    "deadlock.json": Schedule.from_text(Shape(1, 2, 2), {"0.0": "0F0 0B0 0F1 0B1", "0.1": "1F1 1F0 1B0 1B1"}),
    "broken.json": Schedule.from_text(
        Shape(2, 2, 2), one_f_one_b(Shape(2, 2, 2)).text() | {"0.1": "1F0.0 1B0.0 1F0.1"}
    ),
}
PROFILES = {
    "profile.json": Profile(),
    "three.json": Profile([1.0, 1.0, 1.0]),
    "links.json": Profile(links={"*.*>*.4": Link(1.0)}),
}


@pytest.fixture
def files(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    for name, saved in {**SCHEDULES, **PROFILES}.items():
        saved.save(tmp_path / name)
    (tmp_path / "bytes.json").write_bytes(bytes(range(256)))
    (tmp_path / "empty").mkdir()
    return tmp_path


def files_in(folder: Path) -> list[str]:
    """All files but those that runs and caches make before they are asked anything."""
    return sorted(str(path) for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts)


REFUSED = [
    *(
        (f"advise advice.toml --gpus {options}", *said)
        for options, *said in (
            ("12", "--gpus 12: is not a multiple of --gpus-per-node 8"),
            ("8 --set pauses.detct=3", "--set pauses.detct: no such key"),
            ("8 --set pauses.detect=soon", "--set pauses.detect=soon: Expected `float`"),
            ("8 --set failures.repair_p90=1", "repair_p90 1 is below repair_median 20"),
            ("8 --set failures.rate=-1", "--set failures.rate=-1: Expected `float` >= 0"),
            ("8 --set memory.host_bandwidth=fast", "[memory] host_bandwidth: 'fast' is not a size"),
            ("8 --set pauses", "--set pauses: write KEY=VALUE"),
            ("8 --failures none.csv", "none.csv"),
            ("65536", "fits on 65536 GPUs and uses half of them"),
            ("8 --set model.hidden=65536", "no configuration of 8 layers and a global batch of 64", "fits on 8 GPUs"),
        )
    ),
    ("check", "name a schedule file"),
    ("check none.json", "cannot be read (No such file or directory)"),
    ("check empty", "is a directory without any Chrome trace"),
    ("check cut.json", "cut.json", "truncated"),
    ("check bytes.json", "bytes.json"),
    ("check plan.json --job job.toml", "plan.json", "D=1 P=2 m=2", "job.toml", "D=2 P=2 m=2"),
    ("check plan.json --job none.toml", "none.toml: cannot be read"),
    ("check --explain E42", "'E42' is not a code", "deadlock", "fifo"),
    ("compare none.toml", "none.toml"),
    ("compare still.toml --days 0.1", "still.toml: [times]"),
    ("compare job.toml --systems slipstream", "'slipstream' is not a system"),
    ("compare sharded.toml", "[train] sharded_optimizer: systems run other shapes", '"analytic"'),
    ("compare job.toml --trace trace.csv --population 1", "more than the population"),
    ("convert plan.json b.json --to xml", "'xml' is not a format", "native"),
    ("convert plan.json b.json --from xml", "'xml' is not a format", "native"),
    ("convert plan.json b.xml", "no format has the suffix '.xml'"),
    ("convert none.json b.json", "cannot be read"),
    ("convert plan.json a.trace.json --profile three.json", "lists 3 stages"),
    ("convert deadlock.json a.trace.json", "deadlocks", "recycle check"),
    *(
        (f"convert plan.json {to} {option}", option.split()[0], "is for timelines (chrome-trace)", f"written as {name}")
        for option in ("--times 1,1,1", "--overlap 2", "--comm 0.5", "--profile profile.json")
        for to, name in (("b.json", "native"), ("b.csv", "torch-csv"), ("b --to megatron-table", "megatron-table"))
    ),
    ("drain nowhere 1.1", "nowhere: is not a run directory"),
    ("export-hf model -o target", "model: is not a checkpoint, it has no manifest.json"),
    ("export-hf model -o target --shard-size big", "--shard-size: 'big'"),
    ("import-hf none -o target", "none: does not exist"),
    ("import-hf model -o model", "model: exists already; remove it, or choose another"),
    ("import-hf model -o no/x", "x: cannot be written (No such file or"),
    ("plan job.toml --failed 5.2", "worker 5.2 is outside the grid"),
    ("plan job.toml --failed one", "plan: --failed: 'one' is not a worker: write pipeline.rank"),
    ("plan job.toml --failed 0.1,1.1", "plan: --failed: no live worker is left for stage 1"),
    ("plan job.toml --failed 0.0 --failures 1", "--failed or --failures, not both"),
    ("plan job.toml --failures 3 --library more", "at most 2 of the 4 workers can be dead", "got 3"),
    ("plan job.toml --failures 1 -o x.json", "--library DIR instead of -o"),
    ("plan job.toml --failures 1 --library /proc/plans", "/proc/plans: "),
    ("plan job.toml --failures 1 --library /dev/null", "/dev/null: the plan library cannot be created (File exists)"),
    ("plan job.toml --failures 1 --within 0", "--within: must be above 0"),
    ("plan job.toml --failures 1 --within 1e-9", "1e-09 seconds are too few: 3 of 3 vectors have no plan"),
    ("plan job.toml --failures 1 --again", "--again: needs --failures N and --library DIR"),
    ("plan job.toml --library plans --again", "--again: needs --failures N and --library DIR"),
    ("plan job.toml --library nowhere --profile none.json", "recycle: none.json: cannot be read"),
    ("plan job.toml -o /no/such/folder/plan.json", "/no/such/folder"),
    ("plan job.toml -o /dev/full", "/dev/full: cannot be written (it is not a regular file)"),
    ("plan job.toml -o /tmp", "/tmp: cannot be written (it is not a regular file)"),
    ("profile", "--from TRACE"),
    ("profile job.toml --from plan.json", "--from TRACE"),
    ("profile job.toml", "-o FILE"),
    ("profile --from plan.json -o p.json", "plan.json", "without times"),
    ("report nowhere", "is not a run directory"),
    ("report .", "is not a run directory"),
    ("schedule zigzag -P 4 -m 6", "'zigzag' is not a family", ", ".join(FAMILIES)),
    ("schedule 1f1b -P 2 -m 2 -o s.xml", "'.xml'", "native"),
    ("schedule 1f1b -P 2 -m 2 -o no/s.json", "cannot be written"),
    ("schedule gpipe -P 4 -m 8 --times 2,3,1", "--times: gpipe does not take it, only zb-v, v-half, v-min"),
    ("schedule v-min -P 4 -m 8 --times 2,x", "--times '2,x': write F,I,W"),
    ("schedule 1f1b -P 2 -m 2 --replays 3", "no worker has a peer; give -D 2"),
    ("schedule 1f1b -D 2 -P 2 -m 2 --replays 3 --forward-only", "needs the backwards"),
    *(
        (f"schedule 1f1b -D 2 -P 2 -m 2 --replays={given}", f"--replays: '{given}' is neither gaps nor a number")
        for given in ("0", "-1", "gap", "1.5", "9999999")
    ),
    ("schedule 1f1b -P 2 -m 5 --group-size 3", "--group-size: 1f1b does not take it, only interleaved"),
    *(
        (f"simulate plan.json --times={times}", "--times", "F,I,W", "at least 0")
        for times in ("1,2", "1,2,x", "1,2,nan", "-1,2,3", "")
    ),
    ("simulate plan.json --comm=-1", "--comm"),
    ("simulate plan.json --overlap 1,2", "--overlap"),
    ("simulate plan.json --profile none.json", "cannot be read"),
    ("simulate plan.json --profile profile.json --times 1,1,1", "--times or --profile"),
    ("simulate plan.json --job job.toml --times 1,1,1", "--times or --profile or --job"),
    ("simulate plan.json --job job.toml", "has the shape D=1 P=2 m=2", "must be the same"),
    ("simulate plan.json --profile plan.json", "plan.json", "is not a field of a profile"),
    ("simulate plan.json --profile links.json", "'*.*>*.4' names a worker outside the grid"),
    ("simulate none.json", "none.json", "cannot be read"),
    ("simulate deadlock.json --json", "deadlocks", "recycle check"),
    *(
        (f"simulate plan.json --link {link}", "--link")
        for link in ("0.1=4", "0.1,0.1=4", "0.0,0.1", "0.0,0.1=x", "0.0,0.1=0", "0.0,0.1=-1")
    ),
    ("simulate plan.json --link 0.1,1.2=4", "worker 1.2 is outside the grid"),
    ("tokenize text.txt -o new --tokenizer words --eod end --no-eod", "--eod and --no-eod contradict each other"),
    ("tokenize none -o new --tokenizer words", "none: cannot be read"),
    ("tokenize text.txt -o no/x --tokenizer words", "no/x.bin: cannot be written"),
    ("tokenize text.txt -o corpus --tokenizer words", "corpus.idx: exists already; remove it, or choose another name"),
    ("view absent.json", "absent.json: no such file or run directory"),
    ("view cut.json", "cut.json: not valid JSON"),
    ("view empty", "not a run directory"),
    ("view --export plan.svg", "name a schedule file, run directory, job or comparison to draw"),
    ("view job.toml still.toml", "still.toml: is a second job file"),
    ("view many.toml", "many.toml"),
    ("view plan.json --times 1,1,1 --job job.toml", "give --times or --profile or --job"),
]
BY_RUNS = [
    ("profile job.toml -o nowhere/p.json", "nowhere/p.json: cannot be written", "does not exist"),
    ("profile job.toml -o .", ".: cannot be written", "not a regular file"),
    ("profile missing.toml -o p.json", "missing.toml", "cannot be read"),
    ("profile empty -o p.json", "is not a run directory", "job.toml"),
    ("profile wide.toml -o p.json", "tensor_parallel"),
    ("train none.toml", "none.toml", "cannot be read"),
    ("train job.toml --fault kill:1.1@2 --steps 2", "ends after step 1"),
    ("train job.toml --fault explode:1.1@2", "explode", "known are rejoin, nan, flip, slow, slow-link, flaky"),
    ("train job.toml --punish often", "--punish often", "expected MEAN_STEPS"),
    ("train job.toml --punish 2 --fault kill:1.1@2", "--punish and --fault", "one of them"),
    ("train job.toml --steps 0", "steps must be at least 1"),
    ("train job.toml --schedule nowhere", "nowhere", "neither a file nor a family", "1f1b"),
    ("train job.toml --schedule job.toml", "job.toml"),
    ("train job.toml --schedule other.json", "other.json", "D=3 P=2 m=2", "D=2 P=2 m=2"),
    ("train job.toml --schedule broken.json", "does not pass check", "worker 0.1"),
    ("train job.toml --run job.toml", "job.toml"),
    ("train job.toml --resume", "no run to resume", "--run"),
    ("train job.toml --resume --run nowhere", "nowhere", "no such run directory"),
    ("agent job.toml --restarts 1 --node 0", "--restarts", "your own script after --"),
    ("agent job.toml -- ./missing.py", "./missing.py: cannot be run", "after --"),
    ("agent job.toml -- missing-program", "missing-program: cannot be run", "after --"),
    ("agent job.toml --node 0 -- python train.py", "--node", "need --store"),
    ("agent v.toml -- python train.py", "[shape] placement", 'write "loop"'),
    ("agent sharded.toml -- python train.py", "[train] sharded_optimizer", "set it to false"),
]


JOBS = [
    ("plan", 'placement = "v"', '[shape] placement: "v" needs chunks = 2, not 1'),
    (
        "plan",
        'chunks = 2\nplacement = "v"\n[planner]\nlayout = "elastic"',
        '[planner] layout: "elastic" needs [shape] placement = "loop", not "v"',
    ),
    ("plan", "[planner]\nreroute = false", "micro-batches of 0.1 when it is dead; set reroute"),
    ("plan", "[times]\nbackward_input = [1, 0]", "job.toml: [times] backward_input: stage 1 takes 0"),
    ("plan", "[times]\nlink = 1e308", "job.toml: [times] link: a transfer takes 1e+308, more than 1e+12"),
    ("train", "[times]\nforward = 1e30", "[times] forward: stage 0 takes 1e+30"),
    ("train", f"[model]\nvocabulary = {2**31 - 1}", "2147483647 rows of hidden = 64 weigh 549,755,813,632 bytes"),
    ("train", f"[model]\nffn = {2**31 - 1}", "[model] ffn: 2147483647 rows of hidden = 64 weigh"),
    (
        "train",
        '[model]\nkind = "emulated"\nseconds_per_unit = 1e3\n[times]\nforward = 1e9',
        "[model] seconds_per_unit: an operation takes 1e+12 s, at most 1e+06 s can be run",
    ),
]
LARGE = [
    (2, 4194304, "", "job.toml: [shape]: D=2 P=2 m=4194304 has 50,331,648 operations, more than the 4,194,304"),
    (2, 4194304, "--failures 1", "a first plan would need about 50 GB of memory and 8 minutes"),
    (64, 128, "", "[planner] seconds: 5 are too few for the 1,572,864 operations of D=64 P=64 m=128: a first plan"),
]


@pytest.mark.parametrize(("name", "text", "says"), JOBS)
def test_impossible_job_value_is_refused(command, name, text, says):
    Path("job.toml").write_text(f"{SHAPE}{text}\n")
    assert command(name, "job.toml", "--failed 0.1" if name == "plan" else "--run run").refused(says)
    assert not Path("run").exists()


@pytest.mark.parametrize(("size", "micro_batches", "options", "says"), LARGE)
def test_a_job_that_is_too_large_to_plan_is_refused(command, size, micro_batches, options, says):
    shape = f"[shape]\npipelines = {size}\nranks = {size}\nmicro_batches = {micro_batches}\n"
    Path("job.toml").write_text(f"{shape}[planner]\nseconds = 5\n")
    assert command(f"plan job.toml {options}").refused(says)


@pytest.mark.parametrize("row", [*REFUSED, *(pytest.param(row, marks=pytest.mark.process) for row in BY_RUNS)], ids=str)
def test_invalid_input_is_one_line_and_leaves_no_file(row, command, files):
    line, *words = row
    if "-hf" in line:
        write_model(files / "model")
    if "tokenize" in line:
        saved_tokenizer(files / "words")
    before = files_in(files)
    outcome = command(line)
    assert outcome.refused(*words), outcome
    assert files_in(files) == before
    assert (files / "corpus.idx").read_text() == "kept"


@pytest.mark.parametrize(
    "line",
    [
        "schedule",
        "schedule 1f1b -P x -m 1",
        "schedule 1f1b -P 2",
        "schedule 1f1b -P 2 -m 2 --optimizer never",
        "schedule 1f1b -P 2 -m 3 --buckets 0",
        "schedule 1f1b -P 2 -m 3 --buckets 65",
        "drain run 1.1 --in -1",
        "plan job.toml --failures -1",
        "plan job.toml --failures 1 --processes 0",
        "profile job.toml -o p.json --repeats 0",
        "nonsense",
    ],
)
def test_usage_errors_exit_2(command, line):
    outcome = command(line)
    assert (outcome.status, outcome.out) == (2, "")
    assert "Traceback" not in outcome.err
