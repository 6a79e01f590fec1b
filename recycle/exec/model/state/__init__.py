"""What a stage steps with: sums of gradients, the optimizer, and its state in units or in shards.

Begin reading at optimizer.py; `recycle.exec.model.stage.StateLayout` says what the stage asks of it.
"""
