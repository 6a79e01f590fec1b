"""recycle's checker and simulator on a case of this folder:

python -m conformance.run conformance.recycle_checker:check
"""

from __future__ import annotations

from typing import Any

import recycle
from recycle import Link, Profile, Schedule, Shape, simulate

_NAMES = {
    "F": "forward",
    "I": "backward_input",
    "W": "backward_weight",
    "transfer": "latency",
    "pair": "overlapped_pair",
}
_STYLE = {"late-send", "unused-transfer"}


def check(case: dict[str, Any]) -> dict[str, Any]:
    """The verdict on a case: findings, or makespan and period."""
    pipelines, ranks, micro_batches, chunks = case["shape"]
    options = {key: case[key] for key in ("failed", "optimizer", "buckets", "forward_only")}
    shape = Shape(pipelines, ranks, micro_batches, chunks)
    schedule = Schedule.from_text(shape, case["programs"], placement=case["placement"] or None, **options)
    times = {_NAMES.get(name, name): value for name, value in case["times"].items() if name != "copy"}
    if isinstance(times.get("latency"), dict):
        times["links"] = {pair: Link(seconds) for pair, seconds in times.pop("latency").items()}
    copy = case["times"].get("copy")
    profile = Profile(**times, host_bandwidth=1 / copy if copy else None)
    limits = {"limits": case["limits"], "byte_limit": case["byte_limit"], "about_to_run": not case["implied"]}
    findings = recycle.check(schedule, profile=profile, **limits)
    quiet = _STYLE if case["channels"] == "all" else {*_STYLE, "serialised-transport"}
    errors = [[f.rule, f.worker, f.position, f.instruction] for f in findings if f.rule not in quiet]
    if errors or case["implied"]:
        return {"findings": errors}
    timeline = simulate(
        schedule, profile, serialised=case["channels"] == "all", shared=isinstance(case["channels"], list)
    )
    return {"makespan": timeline.makespan, "period": timeline.period}
