"""Partition, placement and order chosen together, beside Megatron's interleaved 1F1B with equal stages.

    python benchmarks/partition.py [--seconds S] [--only MODEL]

Times and bytes come from the analytic model of H100-80GB, with the memory of the device as limit and two chunks per
rank. Large vocabularies make the embedding heavy in memory, and the head in time. A cell is the period of interleaved
1F1B over the period of the plan: stages of equal layers on the loop, then `split = "auto"` on it, then
`placement = "auto"` too; in all these all stages step together, and in the last column each on its own time. A star
marks a schedule that exceeds the memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle.errors import PlanError
from recycle.ir.families import interleaved
from recycle.ir.lower import with_barrier
from recycle.ir.simulate import simulate
from recycle.job import Job, price
from recycle.solve.planner import plan

NAMES = "layers", "hidden", "heads", "ffn", "vocabulary"
MODELS = {
    "Llama-2 13B": (40, 5120, 40, 13824, 32000),
    "Llama-3 70B": (80, 8192, 64, 28672, 128256),
    "Gemma-2 9B": (40, 3584, 16, 14336, 256000),
    "Gemma-2 27B": (48, 4608, 32, 36864, 256000),
}
"""Layers (to the next multiple of eight), hidden size, heads, width of the feed-forward part, vocabulary."""
ROWS = (("Llama-2 13B", 4, 2), ("Llama-3 70B", 8, 8), ("Gemma-2 9B", 4, 2), ("Gemma-2 9B", 4, 4), ("Gemma-2 27B", 8, 4))
"""Model, ranks of the pipeline, tensor-parallel ranks; 4 micro-batches per rank."""
TEXT = """
[shape]
pipelines = 2
ranks = {ranks}
chunks = 2
micro_batches = {micro_batches}
tensor_parallel = {ways}
placement = "{placement}"
[model]
layers = {layers}
hidden = {hidden}
heads = {heads}
ffn = {ffn}
vocabulary = {vocabulary}
sequence = 4096
split = {split}
[train]
precision = "bf16"
[times]
profile = "analytic"
[memory]
limit = "auto"
[planner]
staggered = {staggered}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="per plan")
    parser.add_argument("--only", default="", help="model")
    arguments = parser.parse_args()
    print("| model, P, T | interleaved 1F1B | equal stages | split | split and placement | staggered | chosen |")
    print("|---|---|---|---|---|---|---|")
    for model, ranks, ways in ROWS:
        if model.startswith(arguments.only):
            print(row(model, ranks, ways, arguments.seconds), flush=True)


def row(model: str, ranks: int, ways: int, seconds: float) -> str:
    sizes = dict(zip(NAMES, MODELS[model], strict=True)) | {"ranks": ranks, "ways": ways, "micro_batches": 4 * ranks}

    def job(split: str, placement: str = "loop", staggered: str = "false") -> Job:
        return Job.from_toml(TEXT.format(**sizes, split=split, placement=placement, staggered=staggered))

    equal = price(job(str([sizes["layers"] // (2 * ranks)] * (2 * ranks))))
    usual = simulate(with_barrier(interleaved(equal.shape)), equal.prices)
    caps = equal.limits or [float("inf")] * ranks
    peaks = usual.peak_activations
    exceeded = any((peak or 0) > caps[at % ranks] for at, peak in enumerate(peaks))
    cells = [f"{usual.period:.2f} s{'*' if exceeded else ''}"]
    chosen = ""
    for stated in (equal, job('"auto"'), job('"auto"', "auto"), job('"auto"', "auto", "true")):
        try:
            found = plan(stated, seconds=seconds)
        except PlanError:
            cells.append("does not fit")
            continue
        cells.append(f"{usual.period / found.period:.2f}")
        placed = price(stated.placed(found.schedule.placing or "loop"))
        chosen = f"{placed.grid.placement} {placed.model.split}"
    return f"| {model}, {ranks}, {ways} | {' | '.join([*cells, chosen])} |"


if __name__ == "__main__":
    main()
