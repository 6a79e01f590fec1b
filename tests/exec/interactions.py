"""Random interactions: jobs with several optional features on, struck by faults in random phases.

Each seed draws a small emulated job (shape, chunks, tensor parallelism, evaluation, integrity, sharded optimizer,
layouts, checkpoints, learning rate, reduce buckets) and one to four faults. The job is trained three times: without
optional features and without faults, with the features, and with features and faults. All three must commit the same
losses and gradient norms, bit for bit; the last two also the same evaluations and final states.
"""

import contextlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recycle.cli.planner import plan_for_training
from recycle.errors import JobError
from recycle.exec.faults.faults import check_faults, parse_fault
from recycle.exec.faults.kinds import KINDS
from recycle.exec.launch.launcher import train
from recycle.exec.processes.forkserver import ForkServer
from recycle.job import PricedJob
from tests.exec.runs import calm_run, figures, job, of_kind
from tests.exec.sharded import last_checkpoint, require_equal

ENDING = tuple(name for name, kind in KINDS.items() if kind.ends and not kind.pair)
STEPS = 12

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Interaction:
    """What a seed stands for.

    Attributes:
        plain: the sections without optional features; `sections` has them on.
        faults: as text.
    """

    plain: Sections
    sections: Sections
    faults: tuple[str, ...]


def draw_interaction(seed: int) -> Interaction:
    """The job and the faults of a seed; a combination that recycle refuses is drawn again."""
    draw = random.Random(seed)
    for _ in range(1000):
        plain, sections = _draw_sections(draw)
        with contextlib.suppress(JobError):
            drawn = _job(sections)
            faults = _draw_faults(draw, drawn)
            if faults:
                return Interaction(plain, sections, faults)
    raise AssertionError(f"seed {seed}: no combination was accepted")


def with_real_model(seed: int) -> Interaction:
    """An interaction with a random model of megatron-core's layers in place of the emulated one."""
    draw, drawn = random.Random(f"model {seed}"), draw_interaction(seed)
    model = {
        "kind": draw.choice(["gpt", "llama", "qwen", "mixtral", "gemma"]),
        **{"hidden": 16, "heads": 2, "sequence": 8, "vocabulary": 256},
        "dropout": draw.choice([0.0, 0.1]),
        "tied": draw.random() < 0.3,
        "recompute": draw.choice(["none", "full", "layers", "selective"]),
    }
    train = {
        "precision": draw.choice(["fp32", "bf16"]),
        "optimizer": draw.choice(["adamw", "adamw", "sgd"]),
        "undo": draw.choice(["device", "host"]),
        "per_token_loss": draw.random() < 0.2,
    }
    if any("flip=weight" in fault for fault in drawn.faults):
        train["precision"] = "fp32"  # the next step would round the wrong weight again, and leave its gradient
    for sections in (drawn.plain, drawn.sections):
        sections["model"] |= model
        sections["train"] |= train
        sections["membership"] = {"dead_after": 5.0, "hung_after": 20.0, "drift": 0.0}
    return drawn


def _job(sections: Sections) -> PricedJob:
    keys = {name: dict(values) for name, values in sections.items()}
    shape = keys["shape"]
    return job(shape["pipelines"], shape["ranks"], shape["micro_batches"], **keys)


def _draw_sections(draw: random.Random) -> tuple[Sections, Sections]:
    def chance(share):
        return draw.random() < share

    pipelines, ranks = draw.randint(2, 4), draw.randint(1, 3)
    chunks = 2 if chance(0.25) and ranks > 1 else 1
    shape = {"pipelines": pipelines, "ranks": ranks, "micro_batches": draw.randint(1, 3), "chunks": chunks}
    plain = {
        "shape": shape,
        "model": {"layers": 2 * ranks * chunks},
        "memory": {"limit": (ranks + 2) * chunks},
        "planner": {"seconds": 0.3},
        "train": {"clip": draw.choice([1e9, 1e-3]), "warmup": draw.choice([0, 2]), "checkpoint_every": 0},
        "membership": {"heartbeat": 0.1, "dead_after": 3.0, "hung_after": 3.0, "warm_up": 20.0},
    }
    if chance(0.2) and pipelines * ranks <= 6:
        shape["tensor_parallel"] = 2
    if chance(0.3):
        plain["train"] |= {"schedule": draw.choice(["linear", "cosine"]), "steps": STEPS}
    sections = {name: dict(values) for name, values in plain.items()}
    changed = sections["train"]
    if chance(0.5):
        changed |= {"checkpoint_every": draw.choice([2, 4, 6])}
    if chance(0.25):
        changed |= {"reduce_buckets": draw.choice([2, 3])}
    if chance(0.35):
        changed |= {"sharded_optimizer": True, "optimizer_copies": draw.randint(2, min(3, pipelines))}
    if chance(0.5):
        sections["eval"] = {"every": draw.choice([1, 2, 3, 4, 5]), "batches": draw.choice([1, 2])}
    if chance(0.6):
        every = draw.choice([0, 0, 1, 2, 3, "gaps"])
        digests = draw.choice([0, 1, 2, 3]) if every else draw.choice([1, 2, 3])
        sections["integrity"] = {"digests": digests, "every": every}
    if chance(0.3):
        sections["planner"] |= draw.choice([{"decoupled": False}, {"staggered": False}, {"ahead": 0}, {"move": True}])
    if chance(0.25):
        sections["planner"] |= {"layout": "elastic", "move_when": "always"}
        sections["memory"] |= {"state_limit": 2.5}
    return plain, sections


def _draw_faults(draw: random.Random, drawn: PricedJob) -> tuple[str, ...]:
    """Faults that leave each stage a host that has its state, in an order that can happen."""
    shape, sharded = drawn.shape, drawn.train.sharded_optimizer
    most_dead = drawn.train.optimizer_copies - 1 if sharded else shape.pipelines - 1
    dead = {}
    fenced = []
    faults = []
    step = draw.randint(1, 3)
    for _ in range(draw.randint(1, 4)):
        if step >= STEPS - 1:
            break
        worker = draw.choice(sorted(shape.workers()))
        place = (worker.pipeline, worker.rank)
        if dead and draw.random() < 0.5:
            pipeline, rank = draw.choice(sorted(dead))
            faults.append(parse_fault(f"rejoin:{pipeline}.{rank}@{step}"))
            del dead[pipeline, rank]
        elif place not in dead:
            name, text = _draw_fault(draw, drawn, str(worker), step)
            may_end = KINDS[name].ends or name == "flip"  # a worker that computes wrong may be fenced
            if may_end and [*fenced, *(rank for _, rank in dead)].count(worker.rank) >= most_dead:
                continue
            fault = parse_fault(text)
            try:
                check_faults([*faults, fault], drawn, STEPS)
            except JobError:
                continue
            faults.append(fault)
            if KINDS[name].ends:
                dead[place] = step
            elif may_end:
                fenced.append(worker.rank)
        step += draw.choice([1, 2, 3, 4] if not sharded else [3, 4])
    return tuple(map(str, faults))


def _draw_fault(draw: random.Random, drawn: PricedJob, worker: str, step: int) -> tuple[str, str]:
    integrity = drawn.integrity
    last = STEPS - 2 * max(integrity.digests, _interval(integrity.every)) - 1
    if integrity.compares_states and step < last and draw.random() < 0.4:
        targets = ["gradient", *(["weight", "moment"] if _finds_states(drawn) else [])]
        if integrity.every == 1:  # else the micro-batch may not be replayed in that iteration
            targets += ["activation", "input"]
        return "flip", f"flip={draw.choice(targets)}:{worker}@{step}"
    kind = draw.choice([*ENDING, "kill", "kill", "drain", "nan", "slow"])
    if kind == "slow":
        return kind, f"slow=3:{worker}@{step}-{min(step + 2, STEPS - 1)}"
    phases = [None, *KINDS[kind].phases]
    phase = draw.choice(phases)
    return kind, f"{kind}:{worker}@{step}" + (f".{phase}" if phase else "")


def _interval(every: int | str) -> int:
    return every if isinstance(every, int) else 0


def _finds_states(drawn: PricedJob) -> bool:
    """Whether states are compared at a known interval."""
    return bool(drawn.integrity.digests or _interval(drawn.integrity.every))


def run_interaction(interaction: Interaction, folder: Path, server: ForkServer):
    """Train the three jobs of a seed. Raises AssertionError where they differ."""

    def launch(sections, faults, name):
        struck = [parse_fault(fault) for fault in faults]
        trained = _job(sections)
        return train(trained, folder / name, steps=STEPS, faults=struck, planner=plan_for_training, server=server)

    plain = calm_run(_job(interaction.plain), lambda *_: launch(interaction.plain, (), "plain"), STEPS)
    calm = launch(interaction.sections, (), "calm")
    struck = launch(interaction.sections, interaction.faults, "struck")
    lost = [f"{e['worker']} ({e['cause']})" for e in of_kind(calm, "detected")]
    assert not lost, f"the calm run lost {', '.join(lost)}"
    for name, run in (("features", calm), ("faults", struck)):
        assert figures(run) == figures(plain), f"{name} changed losses or norms"
    assert struck.evaluations == calm.evaluations, "faults changed evaluations"
    assert struck.digests, "the run ended without final states"
    trained = _job(interaction.sections).train
    if trained.checkpoint_every:
        require_equal(last_checkpoint(struck), last_checkpoint(calm))
    has_moved = any(event["kind"] == "layout" and event["moves"] for event in struck.events)
    if not has_moved and not trained.sharded_optimizer:  # else workers end with other layers or shards
        assert struck.digests.items() <= calm.digests.items(), "faults changed final states"
