# shellcheck shell=bash
# What a node of the service needs in its environment before `ray start`. The start commands of the
# cluster files source it from the root of the checkout:
#
#   . cluster/configs/node.sh
#
# A variable that is set already keeps its value: export it in the cluster file, or in ~/.bashrc of one
# host. `eesd preflight`, which comes next, checks the result.

# Gloo and NCCL use the interface of the route to the head. Otherwise they may choose a container
# bridge, which the other nodes cannot reach. `=` makes NCCL take the name as it is, not as a prefix.
_eesd_interface=$(ip -o route get "${RAY_HEAD_IP:-192.0.2.1}" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p')
if [ -n "$_eesd_interface" ] && [ "$_eesd_interface" != lo ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$_eesd_interface}"
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$_eesd_interface}"
fi
unset _eesd_interface

# The key that clients send; the HTTP replicas, on any node, compare with it.
if [ -z "${EESD_API_KEY:-}" ] && [ -r ~/.ray/eesd_api_key ]; then
    EESD_API_KEY=$(cat ~/.ray/eesd_api_key)
    export EESD_API_KEY
fi

# What is installed in .venv runs, and no file of the same name in a folder of the user's.
unset PYTHONPATH

# A proxy is for other hosts: health checks, `serve deploy` and a collector next to it are on this one.
no_proxy="${no_proxy:+$no_proxy,}${NO_PROXY:+$NO_PROXY,}localhost,127.0.0.1,::1"
export no_proxy NO_PROXY="$no_proxy"

# Ray's workers have niceness 15 by default: next to other work on the cores a rank would get little.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"

# Open files: a connection for each client, rank and Ray process.
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"

# Prints this host's line of an inventory such as onprem-hosts.txt, without comments: address, stage,
# ranks, GPUs. Fails if no line has an address or name of this host.
eesd_host() {
    local own line
    for own in $(hostname -I) $(hostname) $(hostname -f 2>/dev/null); do
        if line=$(awk -v own="$own" '$1 == own { print; found = 1 } END { exit !found }' "$1"); then
            echo "$line"
            return 0
        fi
    done
    echo "$1 has no line for this host: expected one that begins with $(hostname -I | tr ' ' ,)$(hostname)" >&2
    return 1
}

# Prints how many GPUs the autoscaler expects of this node, by its node type.
eesd_gpus() {
    local gpus
    gpus=$(sed -n 's/.*"GPU": *\([0-9]*\).*/\1/p' <<< "${RAY_OVERRIDE_RESOURCES:-}")
    echo "${gpus:-0}"
}

# Ends what Ray leaves behind on a worker of one's own. When the head is gone, which is all that `ray
# down` sees to on premises, a raylet ends after RAY_gcs_rpc_server_reconnect_timeout_s, but its agents
# stay for a minute and the log monitor for good. The lock is held until everything has ended: sourcing
# this file waits for it, so that the next `ray start` is not ended too.
_eesd_lock=~/.ray/eesd_node.lock
mkdir -p ~/.ray
flock --timeout 60 "$_eesd_lock" true
eesd_stop_after_ray() {
    # shellcheck disable=SC2016  # the inner shell expands it
    setsid flock "$_eesd_lock" bash -c 'tail --pid="$1" -f /dev/null; ray stop --force' \
        eesd_stop_after_ray "$(pgrep -n -x raylet)" > ~/.ray/eesd_node.log 2>&1 < /dev/null &
}
