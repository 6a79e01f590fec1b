"""Elastic layouts: live workers host other units of the model than before, so that no stage is the bottleneck.

units           costs of the smallest movable parts of the model, and how many a worker may hold
chains          rows of live workers that each host a whole model
ranges          ranges of units for a given load, and the workers' shares of micro-batches
linear          linear and integer programs
hosts           worker of each position or range, with the fewest copies
hostings        candidate hostings
routes          the path of each micro-batch through its hosts, and the schedule of all paths
route_search    order of the operations of all paths
elastic         the plan, the best of re-routing and of hostings; begin here
limits          why no layer moves, and the memory limits that would allow it
"""
