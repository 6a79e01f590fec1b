"""Megatron-style launch: `torchrun --nproc-per-node N -m recycle.exec.worker JOB`."""

from recycle.exec.launch.torchrun import main

main()
