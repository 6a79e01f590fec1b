"""Starts and records runs: the launcher, the agents of a cluster, torchrun, and runs in one process."""
