"""Elastic layouts: which units of the model each live worker hosts, so that no stage is the bottleneck.

units           what the parts of the model that can move cost, and how many of them a worker may hold
chains          live workers in rows, each a whole model cut anew, with micro-batches in proportion to their pace
ranges          any ranges of units: the shares that they allow, and who hosts what so that a load is reached
linear          linear and integer programs
hosts           who plays which position, or takes which range, with as little copied as possible
hostings        the ways to host the model that are worth a try
routes          the way of each micro-batch through its hosts, as legs, and the schedule of all legs
route_search    the order in which workers run legs
elastic         the plan: the best of re-routing and of hostings, with a bound over all layouts; the plan of who is left
                of a layout, in which nobody copies anything
limits          why no layer moves, and the smallest memory limits with which layers would
exact           the integer program of small layouts and their shares, which others are held against
"""
