"""What a worker computes: stages of a GPT (megatron-core) or emulated ones, their split backward, their optimizer."""

from recycle.exec.model.compiling import defer

defer()
