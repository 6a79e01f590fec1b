"""Figures of the families: closed forms where there are any, and what others have published."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest

from recycle import Profile, Shape, check, simulate
from recycle.ir.families import FAMILIES, memory_capped

UNIT = ((1, 1, 1),)
ANY_TIMES = (*UNIT, (2, 3, 1), (1, 2, 3), (3, 2, 1))
Size = tuple[int, int, int]
"""P, m, V."""


@dataclass(frozen=True)
class Form:
    """Figures of a family in closed form.

    Attributes:
        sizes: with which it holds.
        figures: (P, m, V, F, I, W) -> bubble of every worker; inner bubbles and peaks in activations, of each worker or
            the largest.
        times: of F, I and W with which it holds.
    """

    family: str
    sizes: Iterable[Size]
    figures: Callable[..., tuple[float, Any, Any]]
    times: tuple[tuple[int, int, int], ...] = ANY_TIMES
    options: Callable[[int, int], dict[str, Any]] = lambda ranks, micro_batches: {}


def sizes(*pairs: tuple[int, int], chunks=1) -> list[Size]:
    return [(ranks, micro_batches, chunks) for ranks, micro_batches in pairs]


def gpipe(p, m, v, f, i, w):
    extra = (v - 1) * max(0, p - m)
    waits = [(p - 1 - r + extra) * (f + i + w) for r in range(p)]
    return waits[0], waits, [m * v] * p


def one_f_one_b(p, m, v, f, i, w):
    return (p - 1) * (f + i + w), None, [min(p - r, m) for r in range(p)]


def alternating(p, m, v, f, i, w, n=None):
    waits = [(p - 1 - r) * (f + i + w) for r in range(p)]
    peaks = [min(m * v, (v - 1) * (n or p) + 2 * (p - 1 - r) + 1) for r in range(p)]
    return waits[0], waits, peaks


def single_group(p, m, v, f, i, w):
    return (p - 1 + (v - 1) * max(0, p - m)) * (f + i + w), None, None


def zb_h1(p, m, v, f, i, w):
    filled = min(p, m) - 1
    return (p - 1) * (f + i) - filled * min(f, i, w), (p - 1) * (f + i) - filled * min(f, w), [min(p, m)] * p


def zb_h2(p, m, v, f, i, w):
    bubble, inner = ((p - 1) * max(least, i - f, f + i - 2 * w) for least in (f, 0))
    return bubble, inner, [2 * p - 1] * p


def zb_v(p, m, v, f, i, w):
    extra = max(0, p - 2) * max(0, w - i)
    bubble, inner = ((p - 1) * max(most, 2 * (i - w)) + extra for most in (i, i - f))
    return bubble, inner, [2 * p] * p


def capped(cap):
    def figures(p, m, v, f, i, w):
        return max(p - 1, 3 * (2 * p - cap(p)) - 1), None, min(cap(p), 2 * m)

    return figures


CAPS = {
    "v-half": lambda ranks: 2 * (ranks // 2) + 2,
    "v-min": lambda ranks: 2 * ((ranks + 1) // 3 + 1),
}
INTERLEAVED = [(p, n * p, v) for p, v in ((1, 2), (2, 2), (3, 3), (4, 1), (4, 2)) for n in (1, 2, 4)]
GROUPS = {(2, 5, 2): 3, (3, 8, 3): 5, (4, 9, 2): 5, (4, 6, 3): 6}
V_SIZES = [(p, n * p) for p in (1, 2, 3, 4, 5, 6, 7, 8, 16) for n in (1, 2)] + [(4, 5), (7, 9)]
FORMS = {
    "gpipe": Form("gpipe", sizes((2, 2), (4, 4), (4, 8), (8, 16)), gpipe),
    "1f1b": Form("1f1b", sizes((2, 2), (4, 4), (4, 8), (8, 16), (4, 2)), one_f_one_b),
    "interleaved": Form("interleaved", INTERLEAVED, alternating),
    **{
        f"interleaved in groups {size}": Form(
            "interleaved",
            [size],
            lambda *args, n=n: alternating(*args, n=n),
            options=lambda p, m, n=n: {"group_size": n},
        )
        for size, n in GROUPS.items()
    },
    "interleaved in one group below P": Form(
        "interleaved",
        [(2, 1, 2), (4, 3, 2), (4, 2, 3), (4, 2, 1)],
        single_group,
        options=lambda p, m: {"group_size": m},
    ),
    "looped-bfs": Form("looped-bfs", [(1, 2, 3), (2, 5, 3), (4, 6, 1), (8, 8, 2), (4, 1, 3)], gpipe),
    "zb-h1": Form(
        "zb-h1",
        sizes((1, 3), (2, 5), (3, 7), (4, 4), (8, 16), (4, 1), (8, 5)),
        zb_h1,
        (*ANY_TIMES, (6, 3, 5)),
    ),
    "zb-h2": Form("zb-h2", sizes((1, 3), (2, 3), (3, 8), (4, 7), (8, 16)), zb_h2, (*ANY_TIMES, (4, 1, 1))),
    "zb-h2 cut short": Form(
        "zb-h2",
        sizes((2, 2), (3, 4), (4, 1), (8, 8)),
        lambda p, m, *_: (None, 2 * p - 1 - m, [m] * p),
        UNIT,
    ),
    "zb-v": Form(
        "zb-v",
        sizes((1, 3), (2, 3), (3, 5), (4, 12), (6, 12), (8, 16), chunks=2),
        zb_v,
        (*ANY_TIMES[:3], (1, 3, 3), (2, 2, 5), (4, 9, 2)),
    ),
    "zb-v cut short": Form(
        "zb-v",
        sizes((2, 2), (3, 4), (4, 6), (5, 5), (8, 14), chunks=2),
        lambda p, *_: (p - 1, None, 2 * p),
        UNIT,
    ),
    **{name: Form(name, sizes(*V_SIZES, chunks=2), capped(cap), UNIT) for name, cap in CAPS.items()},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_bubbles_and_peaks_follow_the_closed_form(form):
    for ranks, micro_batches, chunks in form.sizes:
        for times in form.times:
            shape, options = Shape(1, ranks, micro_batches, chunks), form.options(ranks, micro_batches)
            timeline = simulate(FAMILIES[form.family](shape, **options), Profile.uniform(*times))
            bubble, inner, peaks = form.figures(ranks, micro_batches, chunks, *times)
            measured = timeline.bubble, timeline.inner_bubble, timeline.peak_activations
            for wanted, figures in zip(
                (None if bubble is None else [bubble] * ranks, inner, peaks), measured, strict=True
            ):
                actual = figures if isinstance(wanted, list) else max(figures)
                assert wanted is None or actual == wanted, (shape, times)


@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 2), (1, 5), (2, 4), (2, 5), (3, 9), (4, 8), (4, 10), (5, 11), (8, 24)]
)
def test_the_worst_bubble_of_dualpipe_v_where_f_equals_i_and_w_is_no_longer(ranks, micro_batches):
    for times in [(1, 1, 1), (2, 2, 1), (3, 3, 2), (3, 3, 0)]:
        for pair in (0.75 * sum(times), sum(times)):
            schedule = FAMILIES["dualpipe-v"](Shape(1, ranks, micro_batches, 2))
            timeline = simulate(schedule, Profile(*times, overlapped_pair=pair))
            assert max(b for b in timeline.bubble if b is not None) == (ranks - 1) * (pair + times[1] - 2 * times[2])
            assert timeline.peak_activations == [2 * ranks + 1] * ranks


@pytest.mark.parametrize("family", [*CAPS, "zb-v"])
@pytest.mark.parametrize("times", ANY_TIMES[1:])
def test_an_order_made_for_the_times_keeps_the_cap_and_is_never_longer(family, times):
    profile, build = Profile.uniform(*times), FAMILIES[family]
    for ranks, micro_batches in [(2, 4), (3, 6), (4, 4), (4, 8), (5, 10), (8, 8)]:
        shape = Shape(1, ranks, micro_batches, 2)
        schedule = build(shape, times=times)
        shortest = 2 * micro_batches * sum(times) + (ranks - 1) * times[0]
        assert shortest <= simulate(schedule, profile).makespan <= simulate(build(shape), profile).makespan
        assert check(schedule, limits=[CAPS.get(family, lambda ranks: 2 * ranks)(ranks)] * ranks) == []


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "cap", "makespan"),
    [(8, 24, 8, 167), (8, 24, 13, 154), (6, 5, 12, 37), (12, 16, 8, 153), (10, 8, 3, 197), (4, 6, 2, 77)],
)
def test_v_schedules_keep_any_cap(ranks, micro_batches, cap, makespan):
    spans = []
    for schedule in islice(memory_capped.under_cap(Shape(1, ranks, micro_batches, 2), cap), 5):
        assert check(schedule) == []
        timeline = simulate(schedule)
        assert max(timeline.peak_activations) <= cap
        spans.append(timeline.makespan)
    assert min(spans) == makespan
