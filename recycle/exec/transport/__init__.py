"""Transports: tensors between workers and sums over hosts, by gloo, NCCL, or in one process. Begin with base.py."""
