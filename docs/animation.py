"""A worker that fails, as an animated picture: all workers, the death, and the plan in which its peers do its work.

    python docs/animation.py [--out FILE]

`make screenshots` calls it for docs/explanations/how-it-works.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle import Worker, simulate
from recycle.ir.families import one_f_one_b
from recycle.job import Job, price
from recycle.solve.planner import plan
from viz.figures import svg
from viz.lanes import LaneTable, Panel, with_common_span

ROOT = Path(__file__).parent.parent
DEAD = Worker(1, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "failing.svg")
    out = parser.parse_args().out
    out.write_text(animation(frames()), encoding="utf-8")
    print(out)
    return 0


def frames() -> list[Panel]:
    """The three pictures."""
    job = Job.load(ROOT / "examples" / "worked_example" / "job.toml")
    profile, found = job.profile(), plan(price(job), [DEAD])
    before, after = simulate(one_f_one_b(job.shape), profile), simulate(found.schedule, profile)
    whole = LaneTable.from_timeline(before)
    struck = replace(whole, failed=np.array([worker == DEAD for worker in whole.workers]))
    return with_common_span(
        [
            Panel("1F1B with all workers", whole, period=before.period),
            Panel(f"Worker {DEAD} dies, its micro-batches are left", struck),
            Panel("Its peers run them in their gaps", LaneTable.from_timeline(after), period=after.period),
        ]
    )


def animation(panels: Sequence[Panel], *, seconds: float = 2.5, width: int = 960) -> str:
    """Return an endless animation of panels as SVG text, `seconds` each; all must have the same workers.

    Viewers without animation show the last panel.
    """
    left, height = svg._gutter(panels), svg.LANE * max(panel.table.lanes for panel in panels)
    body: list[str] = []
    for place, panel in enumerate(panels):
        values = ";".join("1" if frame == place else "0" for frame in range(len(panels)))
        body.append(
            f'<g opacity="{int(place == len(panels) - 1)}"><animate attributeName="opacity" calcMode="discrete"'
            f' values="{values}" dur="{svg._number(seconds * len(panels))}s" repeatCount="indefinite"/>'
        )
        shapes = svg._panel(panel, left, svg.TOP, width - left - svg.RIGHT, height)
        body += map(svg._drawn, shapes)
        body.append("</g>")
    legend = svg._legend(panels, left, svg.height_of([height]) - svg.LEGEND)
    body += map(svg._drawn, legend)
    return svg._document(panels, body, width, svg.height_of([height]))


if __name__ == "__main__":
    raise SystemExit(main())
