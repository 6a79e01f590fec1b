"""What starts a run and records it: the launcher, agents of a cluster, torchrun, one process for all."""
