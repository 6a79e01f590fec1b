"""What a worker computes: stages of a GPT (megatron-core) or emulated ones, their split backward, their optimizer."""
