"""Membership: who is alive, which generation, which plan, what is committed.

One register in the run's store holds it and changes only by compare-and-set; schema.py lists all keys. The default
store belongs to the launcher, and no worker can take it down. What a timeout or a silence means is decided by the
coordinator (coordinator.py) and nowhere else.
"""
