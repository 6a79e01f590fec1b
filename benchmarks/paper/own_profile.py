"""The published artifact's rules on throughputs that each system reaches with the analytic model.

The artifact's tables were measured on other GPUs, so absolute figures differ. Comparable is the share of the throughput
on 30 nodes that a system keeps on a trace.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from benchmarks.paper.artifact import CASES, LEAST, MOST, RULES, TRACES, Case
from recycle.job import Job
from recycle.systems.comparison import KNOWN
from recycle.systems.scenario import Scenario

JOB = """
[shape]
pipelines = 5
ranks = 6
micro_batches = {micro_batches}
[times]
profile = "analytic"
[memory]
limit = "auto"
[model]
layers = 24
hidden = 1024
heads = 16
sequence = {sequence}
vocabulary = {vocabulary}
[data]
micro_batch_size = {micro_batch}
[train]
precision = "bf16"
accumulation = "fast"
[analytic]
gpu = "A100-40GB"
"""
MODELS = {
    "BERT-large": JOB.format(micro_batches=204, sequence=512, vocabulary=30522, micro_batch=8),
    "GPT-2": JOB.format(micro_batches=51, sequence=1024, vocabulary=50257, micro_batch=4),
}
"""Batches of 8,160 and 1,020 samples: the multiples of five pipelines next below the artifact's 8,192 and 1,024."""
RULE = {"oobleck": "oobleck", "recycle": "oobleck", "checkpoint_restart": "varuna"}
"""System -> system of the artifact with the same rule for pauses."""


def throughputs(setting: Scenario, name: str) -> tuple[float, ...]:
    """Return samples per second of a system at 30, 29, … 15 nodes, with randomly chosen dead nodes."""
    system, order = KNOWN[name](setting), random.Random(0).sample(range(MOST), MOST)
    return tuple(
        system.begin(setting.all_nodes - frozenset(order[: MOST - n])).rate for n in range(MOST, LEAST - 1, -1)
    )


def rows(folder: Path) -> list[list[str]]:
    """Model, trace and, for each system, samples per second and its share of the throughput on 30 nodes.

    Args:
        folder: that holds `oobleck/6h.csv` and the others.
    """
    found = []
    for model, text in MODELS.items():
        setting = Scenario.of(Job.from_toml(text))
        tables = {name: throughputs(setting, name) for name in RULE}
        for trace in TRACES:
            cells = [model, trace]
            for name, table in tables.items():
                case: Case = replace(CASES[RULE[name], model], batch=int(setting.samples), table=table)
                reached = RULES[RULE[name]](case, False).run(folder / "oobleck" / f"{trace}.csv").throughput
                published = CASES.get((name if name != "checkpoint_restart" else "varuna", model))
                then = f" ({published.published[TRACES.index(trace)] / published.table[0]:.0%})" if published else ""
                cells.append(f"{reached:.1f}: {reached / table[0]:.0%}{then}")
            found.append(cells)
    return found
