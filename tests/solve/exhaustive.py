"""The smallest period of a tiny problem, over every route and every order that its memory admits."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from math import factorial, prod

from recycle import Profile, simulate
from recycle.solve.problem import Order, Problem
from recycle.solve.search.order_kernels import time_order

SIMULATED = 8
"""Orders, the best by right-shift, that are simulated, as right-shift may be above the true period."""


def best_of_all(problem: Problem, profile: Profile) -> float:
    """The smallest simulated period when any live host of a stage may run any micro-batch."""
    timed = ((time_order(problem, order).period, order) for order in every_order(problem))
    nearest = heapq.nsmallest(SIMULATED, timed)
    return min(simulate(problem.schedule(order), profile).period for period, order in nearest if period < float("inf"))


def every_order(problem: Problem) -> Iterator[Order]:
    """Every order within the caps; some of those with several chunks wait for themselves."""
    for given in _shares(problem):
        chains = [[range(x, problem.size, problem.size // problem.kinds) for x in share] for share in given]
        for programs in itertools.product(*(list(interleavings(own)) for own in chains)):
            order = [list(program) for program in programs]
            if problem.is_within_caps(order):
                yield order


def count_of_orders(problem: Problem) -> int:
    """How many orders there are, within the caps or not."""
    k = problem.kinds
    return sum(
        prod(factorial(k * len(share)) // factorial(k) ** len(share) for share in given) for given in _shares(problem)
    )


def _shares(problem: Problem) -> Iterator[list[list[int]]]:
    """The (stage, micro-batch)es of each worker, flat, for every route."""
    plane = problem.size // problem.kinds
    for route in itertools.product(*(problem.hosts[x // problem.micro_batches] for x in range(plane))):
        yield [[x for x in range(plane) if route[x] == w] for w in range(len(problem.cap))]


def interleavings(chains: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Every way to go through all chains at once."""
    chains = [tuple(chain) for chain in chains if len(chain)]
    if not chains:
        yield ()
    for i, chain in enumerate(chains):
        for remainder in interleavings([*chains[:i], chain[1:], *chains[i + 1 :]]):
            yield (chain[0], *remainder)
