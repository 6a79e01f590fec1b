"""A user's Megatron loop in a session: real processes of examples/megatron_loop/survive.py under a real leader."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from recycle import Job
from recycle.cli.planner import plan_for_training
from recycle.errors import RunError
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import RunResult, train
from tests.cli.command import Command
from tests.exec.agents import Cluster
from tests.exec.etcd_server import ETCD, EtcdServer
from tests.exec.runs import lines_of, live_workers, of_kind
from tests.warm import warm_children

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[2] / "examples" / "megatron_loop" / "survive.py"
STEPS = 6
Survive = Callable[..., RunResult]


def job(pipelines: int = 2, chunks: int = 1, accumulation: str = "exact", ranks: int = 2, tied: bool = False) -> Job:
    return Job.from_toml(
        f"[model]\ntied = {str(tied).lower()}\n"
        f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = 4\nchunks = {chunks}\n"
        f'[planner]\nsteps = 1\n[train]\naccumulation = "{accumulation}"\n'
    )


@pytest.fixture(scope="module")
def survive(servers: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survive]:
    """Run the script: survive(job, "kill:1.1@3", ..., "--option")."""

    def run(described: Job, *arguments: str, steps: int = STEPS) -> RunResult:
        faults = [parse_fault(argument) for argument in arguments if not argument.startswith("-")]
        options = [argument for argument in arguments if argument.startswith("-")]
        result = train(
            described,
            tmp_path_factory.mktemp("run"),
            steps=steps,
            faults=faults,
            planner=plan_for_training,
            server=servers["gpt"],  # type: ignore[arg-type]
            command=[
                sys.executable,
                str(SCRIPT),
                f"--chunks={described.shape.chunks}",
                f"--pipeline={described.shape.ranks}",
                *options,
            ],
        )
        print(arguments, *result.events, sep="\n  ")  # shown if the test fails
        return result

    with warm_children():
        yield run


@pytest.fixture(scope="module")
def calm(survive: Survive) -> RunResult:
    return survive(job(), "--dropout=0.1", "--evaluate=2")


def live(result: RunResult) -> list[int]:
    return live_workers(result)


def printed(result: RunResult, worker: str, what: str = "step") -> dict[int, float]:
    """What the script of a worker prints for each step, or evaluation: a mean that it all-reduces itself."""
    assert result.directory is not None
    text = (result.directory / "logs" / f"{worker}.log").read_text()
    return {int(step): float(loss) for step, loss in re.findall(rf"^{what} (\d+)  loss (\S+)$", text, re.MULTILINE)}


EVALUATION = "evaluation after step"


def test_the_script_trains_without_failures(calm: RunResult) -> None:
    assert live(calm) == [4] * STEPS
    assert calm.losses[-1] < calm.losses[0]
    for worker in ("0.1", "1.1"):
        assert list(printed(calm, worker).values()) == pytest.approx(calm.losses, rel=1e-6)
        evaluations = list(printed(calm, worker, EVALUATION).values())
        assert len(evaluations) == 3
        assert evaluations[2] < evaluations[0]


@pytest.mark.parametrize(
    ("phase", "step"),
    [
        *(pytest.param(phase, 2, marks=pytest.mark.soak) for phase in ("forward", "backward", "reduce", "commit")),
        ("step", 3),  # the script's collectives and its evaluation after step 2 find the peer dead
        pytest.param("stepped", 3, marks=pytest.mark.soak),
    ],
)
def test_survivors_continue_in_their_processes_after_a_death(
    survive: Survive, calm: RunResult, phase: str, step: int
) -> None:
    result = survive(job(), f"kill:1.1@2.{phase}", "--dropout=0.1", "--evaluate=2")
    assert live(result)[2:] == ([3] * 4 if step == 2 and phase != "commit" else [4, 3, 3, 3])
    assert result.losses == calm.losses
    assert [event["worker"] for event in of_kind(result, "detected")] == ["1.1"]
    assert all(printed(result, "0.1")[later] == pytest.approx(calm.losses[later], rel=1e-6) for later in (1, 4, 5))
    assert printed(result, "0.1", EVALUATION) == pytest.approx(printed(calm, "0.1", EVALUATION), rel=1e-6)


def test_a_returning_process_copies_the_state_of_a_peer(survive: Survive, calm: RunResult) -> None:
    result = survive(job(), "kill:1.1@1.commit", "kill:0.0@2", "rejoin:1.1@3", "rejoin:0.0@4", "--dropout=0.1")
    assert live(result)[2:] == [2, 3, 4, 4]  # step 1 may be committed after the death in it
    assert result.losses == calm.losses
    assert printed(result, "1.1")[5] == pytest.approx(calm.losses[5], rel=1e-6)
    assert result.digests == calm.digests


@pytest.mark.soak
def test_an_iteration_whose_gradient_is_not_finite_is_repeated(survive: Survive, calm: RunResult) -> None:
    result = survive(job(), "nan:1.1@2", "--dropout=0.1")
    assert [event["step"] for event in of_kind(result, "undone")] == [2]
    assert result.losses == calm.losses


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_shared_weight_stays_one(survive: Survive, ranks: int) -> None:
    described = job(ranks=ranks, tied=True)
    calm = survive(described, "--tied")
    result = survive(described, f"kill:1.{ranks - 1}@1", "kill:0.0@2", f"rejoin:1.{ranks - 1}@3", "--tied")
    assert result.losses == calm.losses
    assert calm.losses[-1] < calm.losses[0]
    assert result.digests == {worker: calm.digests[worker] for worker in result.digests}


@pytest.mark.soak
def test_weights_in_bf16_survive_and_are_copied(survive: Survive) -> None:
    calm = survive(job(), "--bf16")
    result = survive(job(), "kill:1.1@1", "rejoin:1.1@3", "--bf16")
    assert result.losses == calm.losses
    assert result.digests == calm.digests


@pytest.mark.soak
@pytest.mark.parametrize(("pipelines", "chunks"), [(3, 1), (2, 2)])
def test_other_shapes_survive_two_deaths(survive: Survive, pipelines: int, chunks: int) -> None:
    described = job(pipelines, chunks, "fast")
    calm = survive(described)
    faults = ["kill:1.1@1.backward", "kill:1.0@3"] if pipelines == 3 else ["kill:1.1@1.backward"]
    result = survive(described, *faults)
    assert result.losses == pytest.approx(calm.losses, rel=1e-6)
    assert live(result)[-1] == pipelines * 2 - len(faults)


def test_the_script_starts_again_from_its_checkpoint_after_the_loss_of_a_stage(
    calm: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "job.toml").write_text(job().to_toml())
    recycle = Command(capsys)
    with warm_children():
        ended = recycle(
            *("agent", tmp_path / "job.toml", "--run", tmp_path / "run", "--steps", STEPS, "--restarts", 1),
            *("--fault", "kill:1.1@1", "--fault", "kill:0.1@3", "--", sys.executable, SCRIPT),
            *("--dropout=0.1", f"--checkpoints={tmp_path / 'saved'}"),
        )
    assert ended.status == 0, ended.err
    assert "stage 1 has no live host left after step 2" in ended.out
    before, after = (lines_of(tmp_path / name, "metrics") for name in ("run", "run-1"))
    assert [line["step"] for line in (*before, *after)] == list(range(STEPS))
    assert [line["loss"] for line in (*before, *after)] == calm.losses


@pytest.mark.soak
@pytest.mark.skipif(ETCD is None, reason="no etcd: install Debian's etcd-server")
def test_a_node_is_lost_and_returns(survive: Survive, tmp_path: Path) -> None:
    etcd, steps, described = EtcdServer(tmp_path), 60, job(3)
    spread = msgspec.structs.replace(described, cluster=msgspec.structs.replace(described.cluster, workers_per_node=2))
    calm = survive(described, steps=steps)
    cluster = Cluster(tmp_path, spread, etcd, tmp_path.name, "--steps", str(steps))
    command = "--", sys.executable, str(SCRIPT)
    try:
        for node in range(3):
            cluster.start(node, *command)
        cluster.reach_step(2)
        cluster.kill(cluster.coordinator())
        cluster.reach(lambda: cluster.lines("metrics")[-1]["live_workers"] < 6, "the loss of the node")
        cluster.start(next(node for node, agent in cluster.agents.items() if agent.poll() is not None), *command)
        cluster.reach(lambda: cluster.events("rejoined") != [], "the return of the node")
        cluster.finish()
        cluster.assert_trained_as(calm)
    finally:
        cluster.end()
        etcd.end()


def test_a_process_without_an_agent_has_no_session() -> None:
    from recycle.megatron import session

    with pytest.raises(RunError, match="start the script with: recycle agent JOB -- python SCRIPT"):
        session()
