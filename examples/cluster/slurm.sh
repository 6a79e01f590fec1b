#!/usr/bin/env bash
# Submit with: sbatch examples/cluster/slurm.sh
# The store runs on the first node of the allocation, which is then the one node that must not die; a site that has an
# etcd of its own sets RECYCLE_STORE and RECYCLE_ETCD_PASSWORD instead.
#SBATCH --job-name=recycle
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --no-kill
# 120 s before the time limit all agents get SIGTERM, and the run ends with a checkpoint. With a store that outlives this
# job, and RECYCLE_ID and RUN as they were, another one goes on from it.
#SBATCH --signal=TERM@120
set -euo pipefail

job=${JOB:-examples/cluster/job.toml}
run=${RUN:-$PWD/runs/$SLURM_JOB_ID}

if [ -z "${RECYCLE_STORE:-}" ]; then
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    export RECYCLE_STORE="etcd://$head:2379"
    export RECYCLE_ETCD_PASSWORD=${RECYCLE_ETCD_PASSWORD:-$(head -c 24 /dev/urandom | base64)}
    data=$(mktemp -d)
    trap 'rm -rf "$data"' EXIT
    etcd --data-dir "$data" --listen-client-urls http://0.0.0.0:2379 \
        --advertise-client-urls "http://$head:2379" --listen-peer-urls http://127.0.0.1:2380 \
        --auto-compaction-mode periodic --auto-compaction-retention 5m --log-level error &
    export ETCDCTL_API=3 ETCDCTL_ENDPOINTS=http://127.0.0.1:2379
    until etcdctl endpoint health >/dev/null 2>&1; do sleep 0.2; done
    etcdctl user add "root:$RECYCLE_ETCD_PASSWORD"
    etcdctl user grant-role root root
    etcdctl auth enable
fi

# --kill-on-bad-exit=0: an agent that dies must not take the others with it. --no-kill above says so for whole nodes.
srun --kill-on-bad-exit=0 --no-kill recycle agent "$job" --run "$run"
