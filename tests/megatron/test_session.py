"""A user's Megatron loop in a session: real processes of examples/megatron_loop/survive.py under a real leader."""

import random
import re
import sys
import threading
from pathlib import Path

import pytest

from recycle import Job, JobError, Profile, RunError, Schedule, Worker
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault, punish
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.launch.trackers import Observer
from recycle.ir.formats import named_schedule
from recycle.ir.instruction import Compute
from recycle.runs.logs import plan_file
from tests import ROOT
from tests.cli.command import Command
from tests.exec.accelerator.struck import Waiting, over
from tests.exec.agents import Cluster
from tests.exec.etcd_server import ETCD, EtcdServer
from tests.exec.runs import (
    await_release,
    events_of,
    lines_of,
    live_workers,
    of_kind,
    processes_writing_below,
    shared_memory,
)
from tests.jobs import varied

pytestmark = pytest.mark.process

SCRIPT = ROOT / "examples" / "megatron_loop" / "survive.py"
SEQUENCE, ROWS, VOCABULARY, HIDDEN, LAYERS = 64, 2, 128, 64, 4  # in the script
STEPS, MICRO_BATCHES = 6, 2
MISUSE = Path(__file__).with_name("misuse.py")
PRETRAIN = {"script": SCRIPT.with_name("pretrain.py"), "steps": STEPS + 1}
EXPERTS = "--layers=mixtral", "--sequence-parallel", "--expert-parallel"


def job(
    pipelines=2,
    chunks=1,
    accumulation="exact",
    ranks=2,
    tied=False,
    tensor=1,
) -> Job:
    return Job.from_toml(
        f"[model]\ntied = {str(tied).lower()}\n"
        f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {MICRO_BATCHES}\nchunks = {chunks}\n"
        f"tensor_parallel = {tensor}\n"
        f'[planner]\nsteps = 1\n[train]\naccumulation = "{accumulation}"\ngradient_exponent = 26\n'
    )


class _Stopping(Observer):
    """Asks the run to end, as SIGTERM does, when a step is committed."""

    def __init__(self, step: int | None):
        self._step, self.stop = step, threading.Event()

    def committed(self, line):
        if line["step"] == self._step:
            self.stop.set()


@pytest.fixture(scope="module")
def survive(servers, tmp_path_factory):
    """Run the script: survive(job, "kill:1.1@3", ..., "--option")."""

    def run(described, *arguments, steps=STEPS, script=SCRIPT, stop_at=None):
        stopping = _Stopping(stop_at)
        faults = [parse_fault(argument) for argument in arguments if not argument.startswith("-")]
        options = [argument for argument in arguments if argument.startswith("-")]
        result = train(
            described,
            tmp_path_factory.mktemp("run"),
            steps=steps,
            faults=faults,
            planner=plan_for_training,
            observer=stopping,
            stop=stopping.stop,
            server=servers["gpt"],
            command=[
                sys.executable,
                str(script),
                f"--micro-batches={MICRO_BATCHES}",
                f"--chunks={described.shape.chunks}",
                f"--pipeline={described.shape.ranks}",
                *([f"--tensor={tensor}"] if (tensor := described.grid.tensor_parallel) > 1 else ()),
                *options,
            ],
        )
        print(arguments, *result.events, sep="\n  ")  # shown if the test fails
        return result

    return run


@pytest.fixture(scope="module")
def saved_profile(tmp_path_factory):
    return tmp_path_factory.mktemp("profile") / "measured.json"


@pytest.fixture(scope="module")
def calm(survive, saved_profile):
    return survive(job(), "--dropout=0.1", "--evaluate=2", f"--profile={saved_profile}")


def live(result: RunResult) -> list[int]:
    return live_workers(result)


def printed(result: RunResult, worker: str, what="step") -> dict[int, float]:
    """What the script of a worker prints for each step, or evaluation: a mean that it all-reduces itself."""
    text = (result.directory / "logs" / f"{worker}.log").read_text()
    return {int(step): float(loss) for step, loss in re.findall(rf"^{what} (\d+)  loss (\S+)$", text, re.MULTILINE)}


EVALUATION = "evaluation after step"


def test_the_script_trains_without_failures(calm):
    assert live(calm) == [4] * STEPS
    assert calm.losses[-1] < calm.losses[0]
    for worker in ("0.1", "1.1"):
        assert list(printed(calm, worker).values()) == pytest.approx(calm.losses, rel=1e-6)
        evaluations = list(printed(calm, worker, EVALUATION).values())
        assert len(evaluations) == STEPS // 2
        assert evaluations[-1] < evaluations[0]


def test_a_session_saves_the_measured_times_and_bytes(calm, saved_profile):
    measured = Profile.load(saved_profile)
    for name in ("forward", "backward_input", "backward_weight", "step", "activation"):
        assert min(measured.per_stage(name, 2)) > 0, name
    assert measured.message == [4 * SEQUENCE * ROWS * HIDDEN] * 2
    layer = 12 * HIDDEN**2 + 13 * HIDDEN
    ends = VOCABULARY * HIDDEN + SEQUENCE * HIDDEN, VOCABULARY * HIDDEN + 2 * HIDDEN
    weights = [LAYERS // 2 * layer + end for end in ends]
    assert measured.static == pytest.approx([16 * count for count in weights], rel=0.02)  # and Adam's state, of fp32


@pytest.mark.parametrize(
    ("step", "phase"),
    [
        *(pytest.param(2, phase, marks=pytest.mark.soak) for phase in ("forward", "backward", "reduce", "commit")),
        (2, "step"),  # the script's collectives and evaluation find the peer dead
        *(
            pytest.param(*late, marks=pytest.mark.soak)
            for late in ((STEPS - 1, "step"), (2, "stepped"), (5, "stepped"))
        ),
    ],
)
def test_survivors_continue_in_their_processes_after_a_death(survive, calm, step, phase):
    result = survive(job(), f"kill:1.1@{step}.{phase}", "--dropout=0.1", "--evaluate=2")
    whole = step + (phase not in ("forward", "backward", "reduce"))
    assert live(result)[2:] == [4] * (whole - 2) + [3] * (STEPS - whole)
    assert result.losses == calm.losses
    assert [event["worker"] for event in of_kind(result, "detected")] == ["1.1"]
    for other in {1, 4, 5} - {step}:  # in which the script's collective finds the peer dead
        assert printed(result, "0.1")[other] == pytest.approx(calm.losses[other], rel=1e-6)
    assert printed(result, "0.1", EVALUATION) == pytest.approx(printed(calm, "0.1", EVALUATION), rel=1e-6)
    assert result.digests == {worker: calm.digests[worker] for worker in ("0.0", "0.1", "1.0")}


@pytest.mark.parametrize(
    ("tensor", "options"),
    [
        (1, ()),
        pytest.param(2, EXPERTS, marks=pytest.mark.soak),
    ],
)
def test_sessions_survive_over_communicators_like_nccls(
    survive, calm, tensor, options
):  # Evaluations, the script's collectives and copies have no lanes of the plan there.
    options = (*options, "--dropout=0.1", "--evaluate=2")
    whole = survive(job(tensor=tensor), *options) if tensor > 1 else calm
    faults = "kill:1.1@1.backward", "kill:0.0@2", "rejoin:1.1@3", "rejoin:0.0@4"
    result = survive(over(Waiting, job(tensor=tensor)), *faults, *options)
    assert result.losses == whole.losses
    assert result.digests == whole.digests
    assert printed(result, "0.1", EVALUATION) == pytest.approx(printed(whole, "0.1", EVALUATION), rel=1e-6)


@pytest.mark.soak
def test_an_iteration_whose_gradient_is_not_finite_is_repeated(survive, calm):
    result = survive(job(), "nan:1.1@2", "--dropout=0.1")
    assert [event["step"] for event in of_kind(result, "undone")] == [2]
    assert result.losses == calm.losses


@pytest.mark.parametrize(
    ("ranks", "accumulation", "kind"),
    [
        (1, "exact", ("--bf16",)),
        *(
            pytest.param(*values, marks=pytest.mark.soak)
            for values in ((2, "exact", ()), (1, "exact", EXPERTS), (2, "fast", ()), (2, "exact", ("--fp16",)))
        ),
    ],
)
def test_parts_of_a_distributed_optimizer_have_two_holders(survive, ranks, accumulation, kind):
    pytest.importorskip("einops")  # megatron-core needs it for two instances
    described, last = job(4, accumulation=accumulation, ranks=ranks, tensor=2 if kind == EXPERTS else 1), ranks - 1
    options = ("--instances=2", *kind)
    calm = survive(described, *options)
    # The parts of 1 and 3 are alike: the last steps are made from what the joiner has copied.
    faults = f"kill:1.{last}@1.forward", "kill:2.0@2.stepped", f"rejoin:1.{last}@3", f"kill:3.{last}@4.reduce"
    result = survive(described, *faults, *options, "--overlap")  # which a session switches off
    assert live(result) == [4 * ranks - dead for dead in (0, 1, 1, 1, 2, 2)]
    if accumulation == "exact":
        assert result.losses == calm.losses
        assert result.digests.items() <= calm.digests.items()
    else:
        assert result.losses == pytest.approx(calm.losses, rel=1e-6)


@pytest.mark.soak
def test_the_last_holder_of_a_part_of_the_optimizer_ends_the_run(survive):
    pytest.importorskip("einops")
    with pytest.raises(RunError, match="exit code 75"):
        survive(job(4, ranks=1), "kill:1.0@1", "kill:3.0@2", "--instances=2")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (("--bf16",), {}),
        (("--tied",), {"tied": True}),
        (("--tied",), {"tied": True, "ranks": 4}),
        ((), {"pipelines": 3, "accumulation": "fast"}),
        ((), {"chunks": 2, "accumulation": "fast"}),
        (("--fp16", "--layers=mixtral", "--per-token"), {}),
        (("--layers=llama", "--per-token"), {"accumulation": "fast"}),
        (("--fp16",), {}),
        (("--layers=llama", "--dropout=0.1", "--sequence-parallel"), {"tensor": 2}),
        (("--bf16", "--evaluate=2", "--sequence-parallel"), {"tensor": 2, "accumulation": "fast"}),
        (("--layers=mixtral", "--dropout=0.1", "--sequence-parallel", "--evaluate=2"), {"tensor": 2}),
        ((*EXPERTS, "--dispatcher=alltoall"), {"tensor": 2}),
    ],
)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_other_models_losses_and_shapes_survive_and_return(survive, options, keys, seed):
    described = job(**keys)
    calm, last = survive(described, *options), f"1.{described.shape.ranks - 1}"
    faults = [f"kill:{last}@1.reduce", "kill:0.0@3.commit", f"rejoin:{last}@3"]
    if seed is not None:
        draw, drawn = random.Random(seed), map(str, punish(described.shape, STEPS, 1.5, seed))
        phases = ("", ".forward", ".reduce", ".commit", ".step", ".acknowledge", ".form")
        faults = [fault + draw.choice(phases) if fault.startswith("kill") else fault for fault in drawn]
    result = survive(described, *faults, *options)
    count = described.shape.worker_count
    assert seed is not None or live(result)[:2] == [count, count - 1]
    if keys.get("accumulation") == "fast":
        assert result.losses == pytest.approx(calm.losses, rel=1e-6)
    else:
        assert result.losses == calm.losses
        assert result.digests.items() <= calm.digests.items()
    assert calm.losses[-1] < calm.losses[0]


def computes(schedule: Schedule, worker: Worker) -> list[str]:
    return [str(instruction) for instruction in schedule.program(worker) if isinstance(instruction, Compute)]


def test_returning_processes_copy_the_state_of_a_peer_and_leave_nothing_behind(survive, calm):
    """The script brings a schedule, which runs while all workers live."""
    shared, drawn = shared_memory(), map(str, punish(job().shape, STEPS, 1.5, seed=3))
    result = survive(job(), *drawn, "--schedule=gpipe", "--dropout=0.1", "--evaluate=2")
    assert result.losses == calm.losses
    assert live(result)[3:5] == [3, 4]  # 0.1 and 0.0 are killed and return
    plans = {event["plan"] for event in of_kind(result, "generation")}
    schedules = [Schedule.load(plan_file(result.directory / "plans", plan)) for plan in plans]
    own = named_schedule("gpipe", schedules[0].shape)
    whole = [schedule for schedule in schedules if not schedule.failed]
    assert 0 < len(whole) < len(schedules)
    assert all(computes(schedule, worker) == computes(own, worker) for schedule in whole for worker in own.live)
    assert printed(result, "0.1")[4] == pytest.approx(calm.losses[4], rel=1e-6)
    assert result.digests == {worker: calm.digests[worker] for worker in ("0.0", "0.1", "1.0")}
    assert len({event["worker"] for event in of_kind(result, "detected")}) == 3
    await_release(shared)
    assert processes_writing_below(str(result.directory)) == []


def test_the_script_starts_again_from_its_checkpoint_after_the_loss_of_a_stage(calm, tmp_path, capsys):
    (tmp_path / "saved").mkdir()
    (tmp_path / "job.toml").write_text(job().to_toml())
    recycle = Command(capsys)
    faults = "kill:1.1@1", "kill:0.1@3", "kill:0.0@4.stepped", "kill:1.0@4.stepped"  # the last: between two steps
    start = "agent", tmp_path / "job.toml", "--run", tmp_path / "run", "--steps", STEPS
    options = f"--micro-batches={MICRO_BATCHES}", "--dropout=0.1", f"--checkpoints={tmp_path / 'saved'}"
    script = "--", sys.executable, SCRIPT, *options
    ended = recycle(*(*start, "--restarts", 1), *(word for fault in faults for word in ("--fault", fault)), *script)
    assert ended.status == 75, ended.err  # the second loss; the first one let the script start again
    assert "stage 1 has no live host left after step 2" in ended.out
    assert "stage 0 has no live host left after step 4" in ended.err
    metrics = lines_of(tmp_path / "run", "metrics")
    assert [line["step"] for line in metrics] == list(range(5))
    assert [line["loss"] for line in metrics] == calm.losses[:5]
    assert [line["live_workers"] for line in metrics] == [4, 3, 3, 4, 4]
    assert [event["step"] for event in events_of(tmp_path / "run", "restored")] == [3]
    survivor = (tmp_path / "run" / "logs" / "1.0.log").read_text()
    assert "worker 1.0 leaves the run: stage 1 has no live host left" in survivor
    ended = recycle(*start, "--resume", *script)  # as a scheduler does after exit code 75
    assert ended.status == 0, ended.err
    metrics = lines_of(tmp_path / "run", "metrics")
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert [line["loss"] for line in metrics] == calm.losses
    assert [event["step"] for event in events_of(tmp_path / "run", "restored")] == [3, 4]


def test_a_script_built_like_pretrain_survives_with_its_loaders_and_checkpoints(survive, tmp_path):
    options = f"--train-iters={STEPS + 1}", f"--exit-interval={STEPS}", "--eval-interval=2"
    calm = survive(job(), *options, **PRETRAIN)
    faults = "kill:0.0@2.step", "rejoin:0.0@4"  # the saver of stage 0 dies after a commit, and returns
    result = survive(job(), *faults, *options, f"--save={tmp_path}", **PRETRAIN)
    assert result.losses == calm.losses
    assert logged(result, "1.1", "validation after") == pytest.approx(logged(calm, "1.1", "validation after"), rel=1e-6)
    for run in (calm, result):
        assert run.ended_early  # after `--exit-interval`
        assert (len(run.losses), len(run.digests)) == (STEPS, 4)
    (after_the_loop,) = logged(calm, "1.1", "test")
    assert logged(result, "1.1", "test") == pytest.approx([after_the_loop], rel=1e-6)
    assert len(logged(calm, "1.1", "validation after")) == 3
    saved = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    all_parts = {f"iter_{step:07d}/rank_{rank:03d}.pt" for step in range(STEPS) for rank in range(2)}
    assert all_parts - saved <= {"iter_0000002/rank_000.pt"}  # which it may not have written before it died


def test_the_script_ends_its_loop_early_when_the_run_is_asked_to_end(survive):
    result = survive(job(), f"--train-iters={STEPS + 1}", **PRETRAIN, stop_at=1)
    assert result.ended_early
    assert len(result.losses) in range(2, STEPS)
    assert len(logged(result, "1.1", "test")) == 1  # after the loop
    assert len(result.digests) == 4


def logged(result: RunResult, worker: str, what: str) -> list[float]:
    text = (result.directory / "logs" / f"{worker}.log").read_text()
    return [float(loss) for loss in re.findall(rf"^{what}.* lm loss (\S+)$", text, re.MULTILINE)]


NODES_JOB = job(3)


@pytest.fixture
def start(tmp_path):
    """Start the agents of three nodes with two workers each, with options of the agents and of the script."""
    if ETCD is None:
        pytest.skip("no etcd: install Debian's etcd-server")
    etcd, clusters = EtcdServer(tmp_path), []

    def begin(*options, script=()):
        spread = varied(NODES_JOB, cluster={"workers_per_node": 2})
        command = "--", sys.executable, str(SCRIPT), f"--micro-batches={MICRO_BATCHES}", *script
        clusters.append(Cluster(tmp_path, spread, etcd, tmp_path.name, *options))
        for node in range(3):
            clusters[-1].start(node, *command)
        return clusters[-1], command

    yield begin
    for cluster in clusters:
        cluster.end()
    etcd.end()


@pytest.mark.soak
def test_a_node_is_lost_and_returns(survive, start):
    calm = survive(NODES_JOB, steps=60)
    cluster, command = start("--steps=60")
    cluster.reach_step(2)
    cluster.kill(cluster.coordinator())
    cluster.reach(lambda: cluster.lines("metrics")[-1]["live_workers"] < 6, "the loss of the node")
    cluster.start(next(node for node, agent in cluster.agents.items() if agent.poll() is not None), *command)
    cluster.reach(lambda: cluster.events("rejoined") != [], "the return of the node")
    cluster.finish()
    cluster.assert_trained_as(calm)


@pytest.mark.soak
def test_a_script_starts_again_on_all_nodes(survive, start, tmp_path):
    calm = survive(NODES_JOB, steps=8)
    faults = [f"--fault=kill:{k}.{r}@{step}" for r, step in ((1, 3), (0, 6)) for k in range(3)]
    (tmp_path / "saved").mkdir()
    cluster, _ = start("--steps=8", "--restarts=1", *faults, script=[f"--checkpoints={tmp_path / 'saved'}"])
    for node in range(3):
        cluster.reach_end(node, 75)
    metrics = cluster.lines("metrics")
    assert [line["loss"] for line in metrics] == calm.losses[:6]
    assert [line["live_workers"] for line in metrics] == [6] * 6
    assert [event["step"] for event in cluster.events("restored")] == [3]


@pytest.mark.soak
def test_a_mixture_of_experts_with_tensor_ranks_needs_sequence_parallelism(survive):
    with pytest.raises(JobError, match="with tensor parallelism megatron-core needs sequence parallelism"):
        survive(job(tensor=2), "--layers=mixtral")


def test_a_process_without_an_agent_has_no_session():
    from recycle.megatron import session

    with pytest.raises(RunError, match="start the script with: recycle agent JOB -- python SCRIPT"):
        session()


def test_calls_in_a_wrong_order_or_of_a_wrong_kind_are_refused(survive):
    result = survive(job(pipelines=1), script=MISUSE)
    assert result.ended_early  # by the script
    assert len(result.losses) in (1, 2)
    log = (result.directory / "logs" / "0.0.log").read_text()
    assert log.count("refused:") == 11 + 3 * len(result.losses), log
    assert log.endswith(f"steps traced: {len(result.losses)}\nended\nat exit\n")  # what follows is not cut off
    assert "a child collects: False" in log


def test_a_script_may_end_with_sys_exit_inside_its_session(survive):
    assert survive(job(pipelines=1), "--exit-late", script=MISUSE).ended_early


def test_a_run_that_ends_waits_for_a_script_in_the_middle_of_a_step(survive):
    """As while others save a large checkpoint."""
    result = survive(varied(job(pipelines=1), membership={"grace": 2.0}), "--slow", script=MISUSE, stop_at=1)
    assert result.ended_early
    assert len(result.losses) == 3
    for worker in ("0.0", "0.1"):
        assert (result.directory / "logs" / f"{worker}.log").read_text().endswith("ended\nat exit\n")


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ("--initialized", JobError, "remove init_process_group"),
        ("--diverged", RunError, "worker 0.0 has weights that are NaN at the start"),
        ("--short", RunError, r"0F0.0: the forward step returns \[64, 2, 64\] of float32"),
        ("--exit-early", RunError, r"the script leaves its session before step 0; .* call session\.stop\(\)"),
        ("--detached", RunError, "1F0.0: the loss of the forward step has no gradient"),
    ],
)
def test_a_script_is_told_what_it_does_wrong(survive, option, error, message, tmp_path_factory):
    with pytest.raises(error, match=message):
        survive(job(pipelines=1), option, script=MISUSE)
    run = max(tmp_path_factory.getbasetemp().glob("run*"), key=lambda path: path.stat().st_mtime)
    assert all(log.read_text().count("at exit") <= 1 for log in run.glob("logs/0.?.log"))
