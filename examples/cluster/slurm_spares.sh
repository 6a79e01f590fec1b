#!/usr/bin/env bash
# Spare nodes for a run of slurm.sh: each task of the array holds one node, and takes the place of a node that is lost.
#     RECYCLE_ID=big RUN=$PWD/runs/big sbatch examples/cluster/slurm.sh
#     RECYCLE_ID=big RUN=$PWD/runs/big sbatch examples/cluster/slurm_spares.sh
# Both need the site's etcd (RECYCLE_STORE, RECYCLE_ETCD_PASSWORD), since the one that slurm.sh starts ends with its job.
#SBATCH --job-name=recycle-spare
#SBATCH --array=0-1
#SBATCH --nodes=1
#SBATCH --cpus-per-task=8
#SBATCH --open-mode=append
# 120 s before the time limit, and by scancel, the agent gets SIGTERM, and its workers leave the run.
#SBATCH --signal=B:TERM@120
set -euo pipefail

: "${RECYCLE_STORE:?slurm_spares.sh: set it to the address of the etcd of the run}"
: "${RECYCLE_ID:?slurm_spares.sh: set it to the name of the run, as for slurm.sh}"
: "${RUN:?slurm_spares.sh: set it to the run directory}"
job=${JOB:-examples/cluster/job.toml}
unset SLURM_NODEID SLURM_NNODES # of this task, not of the run

exec python3 examples/cluster/spare.py "$job" --run "$RUN" --resume
