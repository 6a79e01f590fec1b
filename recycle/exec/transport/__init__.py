"""What carries tensors between workers and sums over peers: gloo, NCCL, or one process for all."""
