"""Tuned constants of the planner.

`python benchmarks/gaps.py "1 s" "20 s"` checks the search: a change must not raise a mean gap of gaps.json.
`python benchmarks/planner.py` checks the bounds, and `python benchmarks/elastic.py` the layouts. A share is a part of
the remaining time or steps. The thresholds of the annealing moves are in `search/order_kernels.py`.
"""

from __future__ import annotations

# Initial orders
MUCH_WORK = 1.1  # ratio of the work without slow workers to all work from which these are worth a trial first
FIRST_ORDERS = 5  # that must fit into the time with slow workers, else it is short
FIRST_SECONDS = 0.4  # of all default orders, up to which they are made even if time is over
MOST_LEFT_OUT = 4  # slow workers left out alone, slowest first
TEMPLATE_SHARE, MOST_TEMPLATES = 0.15, 4
PORTFOLIO_SHARE = 0.2
FIRST_WAVES = 60  # of a loop with several chunks per worker
SIMPLE_SHARE, VEE_SHARE = 0.25, 0.4  # for insertion and families with several chunks per worker; on the V
OPERATIONS_AFTER_TEMPLATE = 600_000  # that policies schedule
OPERATION_SECONDS, TOO_LATE = 1e-5, 4.0  # policies are skipped if they need `TOO_LATE` times the remaining time
INSERTION_UP_TO = 200_000  # operations
POLICIES_PER_ASSIGNMENT = 4  # then only policies with the best assignment
IDLE_POLICIES = ((1.0, -1), (1.0, 0), (0.75, 0), (0.75, -1))  # idleness, and forwards beyond the round trip
MOVED_WEIGHTS, MOVED_UP_TO = (1.0, 1.25), 10_000  # idleness with which the W of an order move into waits; operations
MOVED_RATIO = 1.02  # to the best period of a family, up to which its W move
UNFOLD_RATIO = 1.05  # to the best unfolded period, up to which a template is unfolded
UNFOLD_RULES = ((0.9, 0.5, 0.5), (0.9, 1.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, 0.5))
"""Share of its due time at which a micro-batch may begin; patience of F and I, and of W, in typical operation times."""

# Local search
FIRST_START_SHARE = 0.95  # of the remaining time for the best start, among those without some of the slow workers
TEMPLATE_SEARCH_SHARE = 0.45  # of the remaining effort for the search of each template
WAVE_SHARE, WAVE_SECONDS = 0.35, 1e-5  # with several chunks; seconds per operation that waves need
INSERTION_SHARE, PIPELINE_INSERTION_SHARE = 0.3, 0.08  # the second in one pipeline with one chunk
INSERTION_RATIO = 1.15  # to the best period, up to which insertion is varied
POLICY_SHARE, LESS_POLICY_SHARE = 0.3, 0.1  # the second where annealing gains most
POLICY_RATIO = 1.12  # to the best period, up to which a policy is varied
MOST_POLICIES = 4_000
ANNEALING_UP_TO = 10_000  # operations from which annealing gains less than other orders
MOVES_UP_TO = 100_000  # operations from which moving single operations is too slow
WALKS = 2
ONE_WALK_FROM = 1_000  # operations above which one long walk is better, if the limit is in seconds
PROCESS_SECONDS = 4.0  # of search from which processes for the walks pay

# Annealing
HEATS = ((0.15, 0.03), (0.1, 0.02))  # first and last temperature of successive rounds, in typical operation times
LONGEST_ROUND, LONGEST_WORK = 600_000, 240_000_000  # moves, and moves times operations (about a second)
ROUNDS = 6  # for the remaining moves, unless the limits of a round require more
PLAIN_WORK = 2_000_000  # moves times operations per second in plain Python
MOST_PARTS, LEAST_PART = 8, 2_000  # parts of a round, moves of a part
IDLE_ROUNDS = 6  # without success before the search ends; more on larger problems

# Insertion
HOST_PREFERENCE = 1e-3  # lateness allowed to a host for each micro-batch it still has to take, in typical times
SPARE = 0.2  # share by which a host may exceed its number with limited memory

# Waves
WAVE_SIZES = (0.0, 0.3, 0.5, 0.7, 1.0)  # share of the forwards that fill the memory
WAVE_DISTANCES, WAVE_SPACINGS = (0.9, 1.05), (1.0, 0.0)  # in shortest intervals; in longest forwards
WAVE_CLIMBS = 4  # best grid points from which the search continues, in turn
CHANGES = (1, 1, 2, 3)  # numbers of parameters changed at a time

# Bounds
ALL_STAGES = 4  # up to which the linear program includes all stages
FINE_COLUMNS, LEAST_POINTS = 3_000, 80  # of a program on an aligned grid, which determine its points
LARGER_TAKES = 2.0  # expected ratio of a larger program's time to the latest one's
NEAR_ENOUGH = 1.5e-3  # relative accuracy of the longest infeasible window
MOST_PROGRAMS, MOST_ITERATIONS = 12, 100  # per chain of stages; of the interior point method
GRID_POINTS = 40  # at either end of the window, and between, of a grid that is fine at both ends
GRID_STEPS, WIDEST_STEP = 200, 1.5  # distances to try, and their maximum ratio to the shortest

# Layouts
LOADS = (1.02, 1.0025)  # busiest worker over the even share, for which helpers are searched
CLOSE = 1.01  # periods within this factor are equally good; the fewest copies then decide
MOST_CHAINS = 3  # ways to form chains
LISTED_SHARE = 0.5  # for list-scheduling hostings
SIMULATED, LARGE_LAYOUT = (
    3,
    50_000,
)  # hostings simulated, plus that with the fewest copies; legs above which only one is
HAND_OVER = 1e-4  # weight of all micro-batches changing workers once, relative to the busiest worker's load
MOST_REPAIRS = 4_000  # single micro-batches that change workers after rounding
MOST_NODES, MOST_BLOCKS = 30, 32  # of the branch-and-bound tree, and of the model
