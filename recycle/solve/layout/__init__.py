"""Elastic layouts: which units of the model each live worker hosts, so that no stage is the bottleneck.

units     what the parts of the model that can move cost, and how many of them a worker may hold
chains    live workers in rows, each a whole model cut anew, with micro-batches in proportion to their pace
hosts     who plays which position of which chain, with as little copied as possible
joint     the schedules of all chains as one, whose stages lie between the cuts of any chain
elastic   the plan: the best of re-routing and of chains, with a bound over all layouts
"""
