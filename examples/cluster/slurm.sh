#!/usr/bin/env bash
# Submit with: sbatch examples/cluster/slurm.sh          (JOB and RUN name another job file and run directory)
#          or: sbatch examples/cluster/slurm.sh --restarts 3 -- python pretrain.py --load saved   (your own script)
# Each time the job starts, the first node runs an empty etcd, and the agents go on from the newest checkpoint of the run
# directory, which lies on a file system that all nodes share. A site that has an etcd of its own sets RECYCLE_STORE and
# RECYCLE_ETCD_PASSWORD instead.
#SBATCH --job-name=recycle
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
# A node that dies does not end the job; if it is the first one, with this script and etcd, Slurm queues the job again.
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
# 120 s before the time limit this script gets SIGUSR1 and sends SIGTERM to the agents: the run ends with a checkpoint,
# and the job queues itself again. By SIGTERM Slurm cancels a job, and sends it to the agents itself.
#SBATCH --signal=B:USR1@120
set -euo pipefail

job=${JOB:-examples/cluster/job.toml}
run=${RUN:-$PWD/runs/$SLURM_JOB_ID}

if [ -z "${RECYCLE_STORE:-}" ]; then
    read -r port peers < <(python3 -c 'import socket
sockets = [socket.create_server(("", 0)) for _ in range(2)]
print(*[each.getsockname()[1] for each in sockets])')
    export RECYCLE_STORE="etcd://${SLURMD_NODENAME:-$(hostname)}:$port"
    # The password is in the environment and on standard input only: every user of the node can read command lines.
    RECYCLE_ETCD_PASSWORD=$(head -c 24 /dev/urandom | base64)
    export RECYCLE_ETCD_PASSWORD ETCDCTL_API=3 ETCDCTL_ENDPOINTS="http://127.0.0.1:$port"
    data=$(mktemp -d)
    etcd --data-dir "$data" --listen-client-urls "http://0.0.0.0:$port" --advertise-client-urls "http://127.0.0.1:$port" \
        --listen-peer-urls "http://127.0.0.1:$peers" --initial-advertise-peer-urls "http://127.0.0.1:$peers" \
        --initial-cluster "default=http://127.0.0.1:$peers" \
        --auto-compaction-mode periodic --auto-compaction-retention 5m --log-level error &
    etcd=$!
    trap 'kill "$etcd" 2>/dev/null; rm -rf "$data"' EXIT
    until etcdctl endpoint health >/dev/null 2>&1; do
        kill -0 "$etcd" || { echo "slurm.sh: etcd did not start on ports $port and $peers" >&2; exit 1; }
        sleep 0.2
    done
    etcdctl user add root --interactive=false <<<"$RECYCLE_ETCD_PASSWORD"
    etcdctl user grant-role root root
    etcdctl auth enable
fi

is_time_up=""
trap 'is_time_up=yes; scancel --signal=TERM "$SLURM_JOB_ID.0" || true' USR1
trap : TERM # etcd stays until the agents have ended
# --kill-on-bad-exit=0: an agent that dies must not take the others with it. --no-kill above says so for whole nodes.
srun --kill-on-bad-exit=0 --no-kill recycle agent "$job" --run "$run" --resume "$@" &
code=0
wait $! || code=$?
while kill -0 $! 2>/dev/null; do # a signal ended the wait
    code=0
    wait $! || code=$?
done
# 75: your own script has lost all hosts of a stage, and loads its newest checkpoint at its next start.
if [ "$code" = 75 ] || { [ -n "$is_time_up" ] && [ "$code" != 0 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
