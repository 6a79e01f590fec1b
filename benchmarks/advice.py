"""The advice against published runs.

    python benchmarks/advice.py published

Predicts the effective share of the time of published runs from `published_runs.toml` by the advice's closed form for
a job that restarts from a checkpoint. The inputs were committed before the first prediction.
"""

from __future__ import annotations

import argparse
import sys
from math import sqrt
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from recycle.advice.expectation import DAY, effective_share

Case = tuple[float, float, float]
"""Least loss, as stated, most loss."""


class Unpublished(msgspec.Struct, forbid_unknown_fields=True):
    pause: Case
    stall: Case


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """A published run; see the file."""

    name: str
    gpus: int
    source: str
    stated: str
    failures: Case
    published: tuple[float, float]
    pause: Case | None = None
    every: Case | None = None
    stall: Case | None = None

    def predict(self, unpublished: Unpublished) -> Case:
        best, stated, worst = (
            self._share(case, self.pause or unpublished.pause, self.stall or unpublished.stall) for case in range(3)
        )
        return best, stated, worst

    def _share(self, case: int, pause: Case, stall: Case) -> float:
        rate = self.failures[case] / DAY
        every = self.every[case] if self.every else sqrt(2 * stall[case] / rate)
        return effective_share(rate, pause[case], every, stall[case])


class Runs(msgspec.Struct, forbid_unknown_fields=True):
    unpublished: Unpublished
    runs: list[Run]


def published() -> str:
    """Return the table of predictions, in Markdown."""
    known = msgspec.toml.decode(Path(__file__).with_name("published_runs.toml").read_bytes(), type=Runs)
    titles = ("run", "GPUs", "published", "predicted", "interval", "error, in points", "inside")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for run in known.runs:
        best, stated, worst = run.predict(known.unpublished)
        low, high = run.published
        error = max(stated - high, 0.0) - max(low - stated, 0.0)
        figure = f"{low:.0%}" if low == high else f"over {low:.0%}" if high == 1 else f"{low:.0%} to {high:.0%}"
        cells = (
            run.name,
            f"{run.gpus:,}",
            figure,
            f"{stated:.1%}",
            f"{worst:.1%} to {best:.1%}",
            f"{100 * error:+.1f}" if error else "0",
            "yes" if worst <= high and best >= low else "no",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["published"])
    parser.parse_args()
    print(published())


if __name__ == "__main__":
    main()
