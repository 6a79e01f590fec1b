#!/usr/bin/env bash
# Three nodes on this machine: network namespaces with addresses of their own, a member of etcd and an agent on each.
# While the job trains, one node loses power and another its cable; in the end the losses are compared with those of a
# run in which nothing happens.
#     sudo examples/cluster/try_here.sh [JOB]           needs iproute2, etcd and recycle; RECYCLE and STEPS may be set
# A node that is off or cut off has its agent started again when it is back, as Slurm or Kubernetes would do.
set -euo pipefail

job=$(realpath "${1:-"$(dirname "$0")/three_nodes.toml"}")
steps=${STEPS:-200}
read -ra recycle <<<"${RECYCLE:-recycle}"
[ "$(id -u)" = 0 ] || { echo "try_here.sh: network namespaces need root; run it with sudo" >&2; exit 2; }
for tool in ip etcd "${recycle[0]}"; do
    command -v "$tool" >/dev/null || { echo "try_here.sh: $tool is not there; see the top of this script" >&2; exit 2; }
done

name=recycle$$ here=$(mktemp -d)
run=$here/run members="" store=""
for node in 0 1 2; do
    members+="${members:+,}member$node=http://10.77.0.$((node + 1)):2380"
    store+="${store:+,}10.77.0.$((node + 1)):2379"
done

kill_all_on() {
    local pids
    while pids=$(ip netns pids "$1" 2>/dev/null) && [ -n "$pids" ]; do
        kill -KILL $pids 2>/dev/null || true
        sleep 0.1
    done
}
clean_up() {
    touch "$here/over"
    for namespace in "${name}node0" "${name}node1" "${name}node2" "${name}bridge"; do
        kill_all_on "$namespace"
        ip netns delete "$namespace" 2>/dev/null || true
    done
    wait
    rm -rf "$here"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

on() { ip netns exec "${name}node$1" "${@:2}"; }
cable() { ip -n "${name}bridge" link set "port$1" "$2"; }
start_etcd() {
    local address=10.77.0.$(($1 + 1))
    on "$1" etcd --name "member$1" --data-dir "$here/etcd$1" --initial-cluster "$members" --log-level error \
        --listen-client-urls "http://$address:2379" --advertise-client-urls "http://$address:2379" \
        --listen-peer-urls "http://$address:2380" --initial-advertise-peer-urls "http://$address:2380" \
        >>"$here/etcd$1.log" 2>&1 &
}
keep_agent() {
    until [ -e "$here/over" ]; do
        if [ ! -e "$here/off$1" ]; then
            on "$1" "${recycle[@]}" agent "$job" --store "etcd://$store" --node "$1" --steps "$steps" --id try \
                --run "$run" >>"$here/agent$1.log" 2>&1 && return
        fi
        sleep 1
    done
}
lines() { grep -c "$2" "$run/$1.jsonl" 2>/dev/null || true; }
await() {  # FILE PATTERN COUNT: so many lines of the run's file match
    local waited=0
    until [ "$(lines "$1" "$2")" -ge "$3" ] 2>/dev/null; do
        sleep 0.2
        waited=$((waited + 1))
        if [ "$waited" -gt 1500 ]; then
            echo "try_here.sh: $2 did not come $3 times in five minutes" >&2
            tail -n 3 "$here"/*.log >&2
            exit 1
        fi
    done
}
say() { echo "$(date +%T) step $(lines metrics '"step"'): $*"; }

ip netns add "${name}bridge"
ip -n "${name}bridge" link add bridge type bridge
ip -n "${name}bridge" link set bridge up
for node in 0 1 2; do
    ip netns add "${name}node$node"
    ip -n "${name}bridge" link add "port$node" type veth peer name eth0 netns "${name}node$node"
    ip -n "${name}bridge" link set "port$node" master bridge up
    ip -n "${name}node$node" address add "10.77.0.$((node + 1))/24" dev eth0
    ip -n "${name}node$node" link set lo up
    ip -n "${name}node$node" link set eth0 up
    start_etcd "$node"
done
for node in 0 1 2; do keep_agent "$node" & done
echo "three nodes, 10.77.0.1 to 10.77.0.3, start up"
await metrics '"step"' 5

say "node 1 loses power"
touch "$here/off1"
cable 1 down
kill_all_on "${name}node1"
await events '"recovered"' 1
say "the others go on without its workers"
await metrics '"step"' $(($(lines metrics '"step"') + 3))
rm "$here/off1"
cable 1 up
start_etcd 1
say "node 1 is switched on again"
await events '"rejoined"' 4
say "its workers have joined again"

recovered=$(lines events '"recovered"')
say "node 2 is cut off"
cable 2 down
await events '"recovered"' $((recovered + 1))
say "the others go on without its workers"
await metrics '"step"' $(($(lines metrics '"step"') + 3))
cable 2 up
say "node 2 has its cable back"
await events '"rejoined"' 8
say "its workers have joined again"
await events '"finished"' 1

echo "the same without failures, on one machine:"
sed 's/^store = .*/store = "launcher"/; s/^seconds_per_unit = .*/seconds_per_unit = 0/' "$job" >"$here/calm.toml"
on 0 "${recycle[@]}" train "$here/calm.toml" --steps "$steps" --run "$here/calm" >"$here/calm.log" 2>&1 ||
    { tail -n 3 "$here/calm.log" >&2; exit 1; }
losses() { grep -o '"loss": *[^,]*' "$1/metrics.jsonl"; }
if [ "$(losses "$run")" = "$(losses "$here/calm")" ]; then
    echo "$(losses "$run" | wc -l) losses, identical to the last bit: yes"
else
    echo "losses identical to the last bit: no"
    exit 1
fi
