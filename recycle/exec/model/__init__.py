"""Computation of a worker: stages of a megatron-core GPT, the split backward, the optimizer. Begin with stage.py."""

from recycle.exec.model.compiling import defer

defer()
