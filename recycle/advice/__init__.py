"""Advice: which configuration to run on a number of GPUs with failures, and what it will deliver.

`candidates` cuts the model and the batch in all ways, `expectation` computes what a configuration delivers from
failure rates in closed form, and `advise` ranks, prices the best by the planner, and simulates them over failures.
"""
