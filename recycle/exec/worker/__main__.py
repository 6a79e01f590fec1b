"""The way Megatron jobs are launched: `torchrun --nproc-per-node N -m recycle.exec.worker JOB`."""

from recycle.exec.launch.torchrun import main

main()
