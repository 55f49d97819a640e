#!/usr/bin/env bash
# slow_net.sh: a real, slow network on one machine, for as long as one command runs.
#
#   slow_net.sh mpirun N RATE CMD...   N ranks of CMD by the mpirun in PATH, each with a card of its own
#   slow_net.sh ranks N RATE CMD...    the same network around any CMD, for instance a shell
#   slow_net.sh rank CMD...            inside it: CMD behind the card of this MPI rank
#   slow_net.sh shared RATE CMD...     one loopback that all processes of CMD share (cheap, for tests)
#
# RATE as tc writes it, e.g. 1600mbit: a 40 MB message then takes about 0.21 s. Each rank gets a
# network namespace, joined by a bridge, and a token bucket on what it sends. All of it lives in
# namespaces of this process alone: any number can run at once, and the kernel takes everything
# away when the command ends, however it ends. Needs Linux with sch_tbf, iproute2 and util-linux,
# and root (or unprivileged user namespaces). Bandwidth is shaped, latency is not.
#
# SLOW_NET_CONGESTION=reno: TCP congestion control of the ranks; bbr does not keep a steady rate.
# SLOW_NET_BURST=256kb: what a rank may send at once after a pause; far under a message's size.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
NET=198.18.77 # the range that RFC 2544 keeps for benchmarks
SELF=$(readlink -f "${BASH_SOURCE[0]}")
CONGESTION=${SLOW_NET_CONGESTION:-reno}
BURST=${SLOW_NET_BURST:-256kb}

fail() {
  echo "slow_net.sh: $*" >&2
  exit 2
}

usage() {
  sed -n '4,7s/^# \{0,1\}//p' "$SELF" >&2
  exit 2
}

# Runs this script again in fresh mount and network namespaces; a plain user becomes root in them.
private() {
  local map=()
  ((EUID)) && map=(--map-root-user)
  exec unshare "${map[@]}" --mount --net "$SELF" "$@"
}

shape() { # DEVICE RATE BURST
  tc qdisc add dev "$1" root tbf rate "$2" burst "$3" latency 50ms ||
    fail "tc cannot shape $1 to $2: is the rate right, and does the kernel have sch_tbf?"
}

# What both MPIs and gloo need to use TCP on DEVICE between all ranks, and nothing else.
over_tcp() { # DEVICE RATE
  export HPC_OLDSGD_SLOW_NET=$2 GLOO_SOCKET_IFNAME=$1
  export FI_PROVIDER=${FI_PROVIDER:-tcp} MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_NOLOCAL=1
  export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,tcp OMPI_MCA_btl_tcp_if_include=$1
  export OMPI_MCA_btl_tcp_links=${OMPI_MCA_btl_tcp_links:-2}
  # Open MPI as root, and with more ranks than cores.
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
  export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
  export PRTE_MCA_hwloc_default_binding_policy=none
}

inside_ranks() {
  local n=$1 rate=$2 i
  shift 2
  mount -t tmpfs tmpfs /run/netns 2>/dev/null || mount -t tmpfs tmpfs /run
  ip link set lo up
  ip link add br0 type bridge
  ip addr add $NET.254/24 dev br0
  ip link set br0 up
  for ((i = 0; i < n; i++)); do
    ip netns add "rank$i"
    ip link add "port$i" type veth peer name eth0 netns "rank$i"
    ip link set "port$i" master br0 up
    nsenter --net="/run/netns/rank$i" "$SELF" inside_rank "$NET.$((i + 1))" "$rate"
  done
  export PMIX_MCA_ptl_base_if_include=br0 # where all ranks reach mpirun
  over_tcp eth0 "$rate"
  exec "$@"
}

inside_rank() { # ADDRESS RATE
  ip link set lo up
  ip addr add "$1/24" dev eth0
  ip link set eth0 up
  sysctl -qw "net.ipv4.tcp_congestion_control=$CONGESTION" 2>/dev/null || true
  shape eth0 "$2" "$BURST"
}

inside_shared() {
  local rate=$1
  shift
  ip link set lo up
  sysctl -qw "net.ipv4.tcp_congestion_control=$CONGESTION" 2>/dev/null || true
  shape lo "$rate" 512kb
  export FI_TCP_IFACE=lo
  over_tcp lo "$rate"
  exec "$@"
}

command=${1:-}
(($#)) && shift
case $command in
  mpirun)
    (($# >= 3)) || usage
    n=$1 rate=$2
    shift 2
    private inside_ranks "$n" "$rate" mpirun -n "$n" "$SELF" rank "$@"
    ;;
  ranks)
    (($# >= 3)) || usage
    private inside_ranks "$@"
    ;;
  rank)
    (($#)) || usage
    rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-}}}
    [[ -n $rank ]] || fail "no MPI rank in the environment: start this through mpirun"
    [[ -e /run/netns/rank$rank ]] || fail "rank $rank has no card: start more with slow_net.sh mpirun"
    exec nsenter --net="/run/netns/rank$rank" "$@"
    ;;
  shared)
    (($# >= 2)) || usage
    private inside_shared "$@"
    ;;
  inside_ranks | inside_rank | inside_shared) "$command" "$@" ;;
  *) usage ;;
esac
