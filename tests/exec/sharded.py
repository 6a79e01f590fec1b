"""What runs with and without a sharded optimizer are compared by: losses, norms, and every bit of the state."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open

from recycle.exec import RunResult
from recycle.exec.launch.standalone import LocalRun
from recycle.exec.model.stored_tensors import piece_of
from recycle.exec.model.weights import SHARED_WEIGHT
from recycle.job import Job, PricedJob, price
from tests.exec.runs import figures, local_run, varied


def sharded(config: PricedJob, copies=2) -> PricedJob:
    """The job with its optimizer's state sharded."""
    return varied(config, train={"sharded_optimizer": True, "optimizer_copies": copies})


def joined(states: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Named tensors, flat, whose pieces are put together; those that several have must have the same bits."""
    whole = {}
    parts = {}
    for name, tensor in (item for state in states for item in state.items()):
        piece, flat = piece_of(name), tensor.detach().reshape(-1)
        others, key = (whole, name) if piece is None else (parts.setdefault(piece[0], {}), piece[1])
        assert key not in others or torch.equal(others[key], flat), name
        others[key] = flat
    for name, pieces in parts.items():
        whole[name] = torch.cat([pieces[begin] for begin in sorted(pieces)])
    return whole


def state_of(run: LocalRun) -> dict[str, torch.Tensor]:
    """All tensors of a run's stages."""
    return joined(
        stage.named_state(stage.state_tensors()) for stages in run.stages.values() for stage in stages.values()
    )


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, each in one file only but what tied stages share."""
    states = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            states.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    names = [name for state in states for name in state if SHARED_WEIGHT not in name]
    assert len(names) == len(set(names))
    return joined(states)


def names_in(path: Path) -> list[str]:
    with safe_open(str(path), framework="pt") as file:
        return list(file.keys())


def require_equal(result: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]):
    assert result.keys() == wanted.keys(), "other tensors"
    changed = [name for name in wanted if not torch.equal(result[name], wanted[name])]
    assert not changed, f"other bits of {', '.join(changed)}"


def last_checkpoint(run: RunResult) -> dict[str, torch.Tensor]:
    """All tensors of a run's last checkpoint."""
    return stored(max((run.directory / "checkpoints").glob("step-*")))


def require_same_run(run: RunResult, wanted: RunResult):
    """The losses, the norms and the last checkpoint are equal, to the bit."""
    assert figures(run) == figures(wanted)
    require_equal(last_checkpoint(run), last_checkpoint(wanted))


@cache
def _course(config_text: str, steps: int) -> tuple[list[tuple[int, float, float]], dict[str, torch.Tensor]]:
    run = local_run(price(Job.from_toml(config_text)))
    metrics = figures(run.run(steps))
    return metrics, state_of(run)


def calm_course(config: PricedJob, steps: int):
    """Step, loss and norm of all iterations of a `local_run`, and its last state, by the names in a checkpoint."""
    return _course(config.to_toml(), steps)


def require_calm(run: RunResult, config: PricedJob):
    """The losses, the norms and the last checkpoint are those of a `local_run` of a job."""
    metrics, state = calm_course(config, len(run.metrics))
    assert figures(run) == metrics
    require_equal(last_checkpoint(run), state)
