"""Gradient sums and optimizer of a stage, with its state in units or in shards.

Begin with optimizer.py; `recycle.exec.model.stage.StateLayout` is the interface to the stage.
"""
