"""Write docs/measurements/comparison.md and all of its tables.

    python -m benchmarks.paper.comparison [--traces DIR] [--output docs/measurements/comparison.md] [--days N]

Settings are the job files in this folder, priced by the analytic model. Failures are generated, or read from the
public traces in --traces. Nothing is measured on GPUs.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec.structs import replace as changed

from benchmarks.paper import elastic, own_profile
from benchmarks.paper.artifact import CASES, TRACES, replay
from benchmarks.paper.cases import HERE, LARGE, PERIODS, SMALL, periodic, settings, table
from benchmarks.paper.plots import write_plots
from recycle.files import write_whole
from recycle.job import Job
from recycle.job.analytic import assumptions
from recycle.solve.planner import plan
from recycle.systems import SYSTEMS
from recycle.systems.comparison import KNOWN, Comparison, at_dead_shares, compare, references
from recycle.systems.failure_files import read_trace
from recycle.systems.failure_generator import Generator
from recycle.systems.scenario import Scenario
from recycle.systems.system import DoesNotFit

NAMES = [*(name for name in SYSTEMS if name not in (*elastic.MOVING, "job_restart")), "bamboo_1f1b_buffers"]
"""Systems that move layers are compared in another section (`elastic`)."""
SHOWN = [name for name in NAMES if name != "live_migration"]
"""Columns of goodput: live migration is compared with hot spares in one sentence."""
LADDER = ("recycle_adaptive", "recycle_decoupled", "recycle")
PUBLIC = ("infinitehbd/fault_trace.json", "bamboo/p3-trace.csv", "bamboo/g4dn-trace.csv", "bamboo/a100x1-east1b.txt")
SEEDS = 5


def throughput(setting: Scenario, name: str, dead: frozenset[int]) -> tuple[str, float]:
    """(layout, samples per second) of a system on all nodes but `dead`; 0 where it does not run."""
    state = KNOWN[name](setting).begin(setting.all_nodes - dead)
    return state.layout, state.rate


def healthy(every: dict[str, Scenario]) -> str:
    rows = []
    for name, setting in every.items():
        plain, split = references(setting)
        cells = [name, str(setting.gpus), f"{plain.samples_per_second:.1f} ({plain.layout})"]
        cells.append(f"{split.samples_per_second:.1f} ({split.layout})")
        for system in SHOWN:
            runs, samples = throughput(setting, system, frozenset())
            cells.append(f"{samples:.1f} ({runs})" if samples else "-")
        rows.append(cells)
    return table(["setting", "GPUs", "1F1B", "zero-bubble", *SHOWN], rows)


def misfits(every: dict[str, Scenario]) -> str:
    rows = []
    for name, setting in every.items():
        for system in NAMES:
            state = KNOWN[system](setting).begin(setting.all_nodes)
            if isinstance(state, DoesNotFit):
                grid, _, _ = state.reason.partition(":")
                rows.append([name, system, grid, f"{state.needed / 1e9:.0f}", f"{state.cap / 1e9:.0f}"])
    return table(["setting", "system", "grid", "GB needed", "GB available"], rows)


def dead_shares(every: dict[str, Scenario]) -> str:
    """Throughput over that of the fault-scaled 1F1B, mean over random dead sets."""
    names = [name for name in NAMES if name not in ("hot_spare", "live_migration")]
    rows: dict[tuple[str, int], list[str]] = {}
    behind: dict[tuple[str, int], str] = {}
    for name, setting in every.items():
        for one in at_dead_shares(setting, names, SEEDS):
            plain = one.of_scaled["1f1b"]
            ratios = [f"{plain[system]:.3f}" if plain[system] else "-" for system in names]
            best = max(names, key=lambda system: plain[system])
            key, dead = (name, one.dead), f"{one.dead} of {setting.nodes}"
            if plain[best] > plain["recycle"] * 1.0005:
                behind[key] = f"- {name}, {dead} dead: {best} has {plain[best] / plain['recycle']:.3f} times as much."
            rows[key] = [name, dead, *ratios]
    words = [
        "",
        "ReCycle is slower where its fastest fault-free shape has few pipelines or few bubbles. Sample dropping reduces"
        " the batch.",
        "",
        *behind.values(),
    ]
    shown = table(["setting", "dead nodes", *names], rows.values())
    return shown + "\n".join(words if behind else [])


def ladder(every: dict[str, Scenario]) -> str:
    """ReCycle's techniques one by one, fault-free and with dead nodes, over fault-free 1F1B."""
    rows = []
    for name, setting in every.items():
        plain, _ = references(setting)
        for count in (0, 1, max(2, round(0.05 * setting.nodes))):
            dead = frozenset(random.Random(0).sample(range(setting.nodes), count))
            ratios = [throughput(setting, step, dead)[1] / plain.samples_per_second for step in LADDER]
            rows.append([name, str(count), *(f"{ratio:.3f}" for ratio in ratios)])
    return table(["setting", "dead nodes", "adaptive", "+ decoupled", "+ staggered"], rows)


def ablation() -> str:
    """The techniques one by one over micro-batches and failures: unit times, D=4 P=8, memory without limit."""
    rows = []
    for micro_batches in (8, 16, 32):
        setting = Scenario.of(Job.from_toml(f"[shape]\npipelines = 4\nranks = 8\nmicro_batches = {micro_batches}\n"))
        plain, _ = references(setting)
        for count in (0, 1, 5):
            dead = frozenset(random.Random(0).sample(range(setting.nodes), count))
            ratios = [throughput(setting, step, dead)[1] / plain.samples_per_second for step in LADDER]
            rows.append([str(micro_batches), str(count), *(f"{ratio:.3f}" for ratio in ratios)])
    return table(["m", "dead workers", "adaptive", "+ decoupled", "+ staggered"], rows)


@dataclass
class Verdicts:
    """How ReCycle stood in every row of goodput."""

    rows: int = 0
    behind: list[str] = field(default_factory=list)
    over_oobleck: list[float] = field(default_factory=list)
    over_bamboo: list[float] = field(default_factory=list)
    migration_over_spares: list[float] = field(default_factory=list)

    def words(self) -> str:
        ahead = self.rows - len(self.behind)
        lines = [
            f"ReCycle has the highest goodput in {ahead} of {self.rows} rows: {min(self.over_oobleck):.2f} to"
            f" {max(self.over_oobleck):.2f} times that of Oobleck (published: up to 1.46), and"
            f" {min(self.over_bamboo):.2f} to {max(self.over_bamboo):.2f} times that of Bamboo with the activations"
            " of 1F1B (published: up to 1.64). Bamboo with one buffer per micro-batch fits into memory in none of"
            " the settings. Live migration has"
            f" {min(self.migration_over_spares):.2f} to {max(self.migration_over_spares):.2f} times the goodput of hot"
            " spares and is not listed."
        ]
        return "\n".join(lines + [f"- Behind: {row}." for row in self.behind])


VERDICTS = Verdicts()


def goodput_row(label: list[str], one: Comparison) -> list[str]:
    """Samples per second of each system, and ReCycle's ratio to Oobleck, and to the fault-scaled references."""
    goodput = {outcome.system: outcome.goodput for outcome in one.outcomes}
    cells = [f"{goodput[name]:.1f}" if goodput[name] else "-" for name in SHOWN]
    best = max(goodput, key=lambda name: goodput[name])
    over = goodput["recycle"] / goodput["oobleck"] if goodput["oobleck"] else float("inf")
    VERDICTS.rows += 1
    VERDICTS.over_oobleck.append(over)
    VERDICTS.migration_over_spares.append(goodput["live_migration"] / goodput["hot_spare"])
    if goodput["bamboo_1f1b_buffers"]:
        VERDICTS.over_bamboo.append(goodput["recycle"] / goodput["bamboo_1f1b_buffers"])
    if best != "recycle":
        VERDICTS.behind.append(f"{', '.join(label)}: {best} has {goodput[best] / goodput['recycle']:.3f} times as much")
    scaled = [goodput["recycle"] / (r.samples_per_second * one.live) for r in one.references]
    return [*label, f"{one.live:.1%}", *cells, f"{over:.2f}", *(f"{ratio:.3f}" for ratio in scaled)]


GOODPUT_HEAD = ["alive", *SHOWN, "recycle / oobleck", "/ scaled 1F1B", "/ scaled zero-bubble"]


def frequencies(every: dict[str, Scenario]) -> str:
    rows = []
    for name, setting in every.items():
        for label, hours in PERIODS:
            for back in (True, False):
                (one,) = compare(setting, [periodic(setting.nodes, hours, back)], NAMES)
                rows.append(goodput_row([name, label, "yes" if back else "no"], one))
    return table(["setting", "a failure per", "come back", *GOODPUT_HEAD], rows)


def hardware(every: dict[str, Scenario], days: float) -> str:
    rows = []
    for name, setting in every.items():
        (one,) = compare(setting, [Generator(days=days, seed=1).trace(setting.nodes)], NAMES)
        rows.append(goodput_row([name, str(one.trace.failures)], one))
    return table(["setting", "failures", *GOODPUT_HEAD], rows)


def public(every: dict[str, Scenario], folder: Path) -> str:
    rows = []
    for file in PUBLIC:
        for name, setting in every.items():
            (one,) = compare(setting, [read_trace(folder / file)], NAMES)
            rows.append(goodput_row([Path(file).name, name], one))
    return table(["trace", "setting", *GOODPUT_HEAD], rows)


def sweep(setting: Scenario, days: float) -> str:
    rows = []
    trace = Generator(days=days, rate=42, seed=1).trace(setting.nodes)
    for seconds in (0.2, 76.0):
        pauses = changed(setting.pauses, detect=seconds, plan=0.0, rebuild=0.0)
        (one,) = compare(replace(setting, pauses=pauses), [trace], NAMES)
        rows.append(goodput_row([f"{seconds:g} s"], one))
    return table(["pause", *GOODPUT_HEAD], rows)


def bubbles() -> str:
    """Unit times, four pipelines of eight stages, memory without limit: what more micro-batches do to the ratios."""
    rows = []
    for micro_batches in (8, 16, 32, 64, 128):
        shape = f"[shape]\npipelines = 4\nranks = 8\nmicro_batches = {micro_batches}\n"
        setting = Scenario.of(Job.from_toml(shape))
        plain, _ = references(setting)
        for dead in (0, 1):
            nodes = frozenset(random.Random(0).sample(range(32), dead))
            at = {name: throughput(setting, name, nodes)[1] for name in ("recycle", "oobleck", "bamboo")}
            ratios = [at["recycle"] / at[name] if at[name] else float("inf") for name in ("oobleck", "bamboo")]
            ideal = plain.samples_per_second * (1 - dead / 32)
            rows.append([str(micro_batches), str(dead), *(f"{r:.2f}" for r in ratios), f"{at['recycle'] / ideal:.3f}"])
    return table(["m", "dead", "recycle / oobleck", "recycle / bamboo", "recycle / scaled 1F1B"], rows)


def calibration(folder: Path) -> str:
    """The rows in which published, restated and corrected averages differ by over 0.5 %."""
    rows = []
    for (system, model), case in CASES.items():
        for name, published in zip(TRACES, case.published, strict=True):
            ours, without = (
                replay(system, model, folder / "oobleck" / f"{name}.csv", flaws) for flaws in (True, False)
            )
            figures = (published, ours.throughput, without.throughput)
            if max(figures) > 1.005 * min(figures):
                rows.append([system, model, name, *(f"{figure:.2f}" for figure in figures)])
    return table(["system", "model", "trace", "published", "restated", "without its flaws"], rows)


def planner_times(every: dict[str, Scenario]) -> str:
    """Return the table of quick plans, which a run uses after a failure that the library does not cover."""
    rows = []
    for name, setting in every.items():
        count = max(2, round(0.05 * setting.shape.worker_count))
        dead = random.Random(0).sample(sorted(setting.shape.workers()), count)
        begun = time.process_time()
        found = plan(setting.job, dead, quick=True)
        seconds = time.process_time() - begun
        figures = f"{found.period:.4g}", f"{found.lower_bound:.4g}", f"{found.gap:.1%}", f"{seconds:.1f}"
        rows.append([name, str(setting.shape), str(count), *figures])
    return table(["setting", "shape", "dead workers", "period, s", "bound, s", "gap", "CPU seconds"], rows)


def own_cells(folder: Path) -> str:
    """Return the table of the artifact's traces with the analytic model's throughputs, and where ReCycle is behind."""
    head, rows = ["model", "trace", "oobleck", "recycle", "checkpoint_restart"], own_profile.rows(folder)
    behind = []
    for row in rows:
        reached = {name: float(cell.partition(":")[0]) for name, cell in zip(head[2:], row[2:], strict=True)}
        best = max(reached, key=lambda name: reached[name])
        if best != "recycle":
            behind.append(f"{row[0]}, {row[1]}: {best} has {reached[best] / reached['recycle']:.3f} times as much.")
    return table(head, rows) + "".join(f"\nReCycle is behind on {text}\n" for text in behind)


def lost(one: Comparison) -> str:
    causes = [cause for cause in one.outcomes[0].lost if any(abs(o.lost[cause]) > 0.5 for o in one.outcomes)]
    rows = [
        [o.system, o.layout, f"{o.ettr:.2%}", *(f"{100 * o.lost[cause] / o.seconds:.2f}" for cause in causes)]
        for o in one.outcomes
        if o.misfit is None and o.system in SHOWN
    ]
    return table(["system", "runs", "ETTR", *causes], rows)


def ways(every: dict[str, Scenario]) -> str:
    """How ReCycle steps in each setting."""
    chosen = {name: KNOWN["recycle"](setting).job for name, setting in every.items()}
    named = {
        name: f"{job.train.undo} ({job.shape.pipelines} x {job.shape.ranks})" if job.planner.staggered else "barrier"
        for name, job in chosen.items()
    }
    return ", ".join(f"{name} {way}" for name, way in named.items())


def assumed(every: dict[str, Scenario]) -> str:
    """What the times and bytes are computed from: each assumption once, with the settings that it holds for."""
    holders: dict[str, list[str]] = {}
    for name, setting in every.items():
        for part in "; ".join(assumptions(setting.job)).split("; "):
            holders.setdefault(part, []).append(name)
    shared: dict[str, list[str]] = {}
    for part, names in sorted(holders.items(), key=lambda item: len(item[1])):
        shared.setdefault(", ".join(names) if len(names) < len(every) else "all", []).append(part)
    return "\n".join(f"- **{names}**: {'; '.join(parts)}." for names, parts in shared.items())


HARD = "gpt3_6_7b at ten times the usual failure rate"


def page(folder: Path | None, days: float, pictures: Path) -> str:
    every = settings((*SMALL, *LARGE))
    small, large = {n: every[n] for n in SMALL}, {n: every[n] for n in LARGE}
    tried = KNOWN["recycle"](every["gpt3_6_7b"])
    (hard,) = compare(every["gpt3_6_7b"], [Generator(days=days, rate=42, seed=1).trace(32)], NAMES)
    parts = [
        "# Resilience systems compared",
        "Systems that survive failures, simulated with times and bytes of an analytic model; nothing was measured on"
        " GPUs. All get the same nodes, layers, links, memory, batch, failures and pauses, and each chooses its shape"
        " on the same GPUs; spares count as GPUs. `recycle/systems/` states the assumptions about each system."
        " `python -m benchmarks.paper.comparison` writes this page.",
        "VERDICT",
        "The settings of the published maxima are not public. With as many micro-batches as stages the ratios are"
        " about as large as published (see *Bubbles*), and most of the gain comes from splitting the backward pass;"
        " batches of hundreds of samples on 32 GPUs leave few bubbles. Oobleck's planning model assumes four"
        " micro-batches per stage; with more, Oobleck may start slightly below the best 1F1B grid.",
        "Only ReCycle holds the state before a staggered step, 14 bytes per parameter in addition to 18, and therefore"
        " fewer activations. It chooses where: on the GPU, on the host (over PCIe at 25 GB/s, counted as part of the"
        f" step), or nowhere, in which case all stages step together. Chosen: {ways(every)}.",
        "## The settings",
        assumed(every),
        f"Pauses: {tried.setting.pauses.detect:g} s to detect, {tried.setting.pauses.plan:g} s to plan,"
        f" {tried.setting.pauses.rebuild:g} s to rebuild groups, {tried.setting.pauses.start:g} s until a new node is"
        f" usable, {tried.setting.pauses.restart:g} s and the reading of a checkpoint to restart all processes. Copies"
        " run at the link's bandwidth.",
        "## Without failures",
        "Samples per second (pipelines x depth). ReCycle gains by split backward passes and staggered steps.",
        healthy(every),
        "These (-) do not fit into memory; the figures are of the worker that needs most. A worker of Bamboo holds the"
        " state of two stages, and activations of all its micro-batches; `bamboo_1f1b_buffers` has the activations of"
        " 1F1B.",
        misfits(every),
        "## Dead nodes",
        f"Throughput divided by that of fault-free 1F1B times the share of live nodes (*scaled*), mean of {SEEDS}"
        " random sets of dead nodes.",
        dead_shares(every),
        elastic.section(every, days),
        "## ReCycle's techniques one by one",
        "Throughput divided by that of fault-free 1F1B.",
        ladder(every),
        "The same with unit times, D=4 P=8 and no memory limit:",
        ablation(),
        "## Bubbles",
        "Unit times, D=4 P=8, no memory limit: ratios of throughput with the same dead nodes. The bubble of 1F1B is"
        " (P - 1) of (m + P - 1) slots.",
        bubbles(),
        "## Planner time",
        "Plans that are made when a failure without a stored plan strikes, within half a second: a busy or slower"
        " machine tries fewer orders, and may end with a longer period. `python benchmarks/planner.py` searches"
        " longer.",
        planner_times(every),
        "## One failure per 6 h, 2 h, 30 min on 32 GPUs",
        "Goodput in samples/s over twelve periods. A node returns after two periods, or never.",
        frequencies(small),
        "## Hardware failures",
        f"Generated with the defaults of `recycle.systems.failure_generator`, {days:g} days.",
        hardware(every, days),
    ]
    if folder is not None:
        parts += [
            "## Public traces",
            "Larger traces are sampled; with smaller ones, the other nodes never fail. The spot traces lose nodes"
            " 600 to 3,500 times as often as hardware failures do.",
            public({**small, "145b": large["145b"]}, folder),
        ]
        parts += [
            "## The artifact's bookkeeping",
            "Oobleck's published artifact averages throughput tables over traces. Its rules, restated, give its results"
            " from the same tables. The last column is without its flaws, such as bulk removals that stop training;"
            " `artifact.py` lists them. Rows whose figures agree within 0.5 % are left out.",
            calibration(folder),
            "The same without flaws, on simulated throughputs (`own_profile.py`: A100-40GB by the analytic model; the"
            " artifact measured other GPUs): samples per second, their share of the rate on 30 nodes, and in brackets"
            " the published share. An iteration is ten times shorter here, so checkpoint-restart spends most of its"
            " time on a checkpoint of 12 to 16 s after every tenth step, as Varuna writes it.",
            own_cells(folder),
        ]
    parts += [
        "## Longer pauses",
        "gpt3_6_7b at ten times the usual failure rate. The pause is the time to detect, plan and rebuild groups.",
        sweep(every["gpt3_6_7b"], days),
        "Lost time in the same run, in per cent, with the pauses of the other sections:",
        lost(hard),
        "`recycle view` draws such pictures for any comparison that `recycle compare --save` wrote:",
        *(f"![{spoken}](../pictures/{name})" for name, spoken in write_plots(hard, HARD, pictures).items()),
    ]
    parts[parts.index("VERDICT")] = VERDICTS.words()
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("RECYCLE_TRACES") or HERE.parents[2] / "shared" / "traces")
    parser.add_argument("--traces", type=Path, default=default, help="folder of the public traces; left out if missing")
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "docs" / "measurements" / "comparison.md")
    parser.add_argument("--days", type=float, default=30.0, help="of the generated traces")
    options = parser.parse_args()
    begun = time.process_time()
    pictures = options.output.parent.parent / "pictures"
    pictures.mkdir(exist_ok=True)
    text = page(options.traces if options.traces.is_dir() else None, options.days, pictures)
    write_whole(options.output, text)
    print(f"{options.output}: {len(text.splitlines())} lines in {time.process_time() - begun:.0f} CPU seconds")


if __name__ == "__main__":
    main()
