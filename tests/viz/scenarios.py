"""Random scenarios of a page, and their timelines by the simulator alone."""

from __future__ import annotations

import random
from dataclasses import replace

from recycle import Profile, Schedule, Shape, Timeline, Worker, simulate
from viz.scenario import Scenario


def random_scenario(rng: random.Random, shapes: list[Shape]) -> Scenario:
    """A scenario that fits schedules of these shapes, with a value for some fields."""
    values = {
        name: f"{rng.choice([0.25, 1.0, rng.uniform(0.1, 3.0)]):.4g}"
        for name in ("F", "I", "W", "link", "step", "limit")
    }
    times = " ".join(f"{name}={value}" for name, value in values.items() if rng.random() < 0.6)
    ranks = min(shape.ranks for shape in shapes)
    slow = [f"0.{rng.randrange(ranks)}={rng.choice(['2', '0.5'])}"] if rng.random() < 0.5 else []
    links = ["0.0>0.1=3"] if ranks > 1 and rng.random() < 0.5 else []
    return Scenario(times, " ".join([*slow, *links]))


def expected_timeline(schedule: Schedule, share: float, scenario: Scenario) -> Timeline:
    """The same scenario through the simulator alone."""
    values = {name: float(value) for name, _, value in (word.partition("=") for word in scenario.times.split())}
    given = {"F": share, "I": share, "W": share, "link": 0.0, "step": 0.0}
    given |= {name: value * (1 if name == "link" else share) for name, value in values.items() if name in given}
    profile = Profile(given["F"], given["I"], given["W"], latency=given["link"], step=given["step"])
    for word in scenario.workers.split():
        name, _, factor = word.partition("=")
        if ">" in name:
            sender, receiver = map(Worker.parse, name.split(">"))
            profile = profile.with_slow_link(schedule.shape, sender, receiver, float(factor))
        else:
            profile = replace(profile, speed={name: float(factor)})
    return simulate(schedule, profile)
