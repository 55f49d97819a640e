#!/usr/bin/env bash
# nodes.sh N COMMAND...: runs a command on node1 of N simulated nodes, which end with the command.
#
#   sudo tests/jobs/nodes.sh 2 bash                  a shell on node1; on_node node2 hostname
#
# A node has its own host name, shared memory and two network cards, eth0 (10.1.0.K) and eth1 (10.2.0.K).
# The files are the same everywhere. `on_node NODE COMMAND...` takes the place of ssh: mpirun starts what it
# needs on other nodes with it. All of it lives in namespaces of this command. When it ends, however it
# ends, the kernel ends every process and removes every card.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

if [[ ${1:-} != --inside ]]; then
  (($# > 1)) || { sed -n '2,4s/^# \{0,1\}//p' "$0" >&2; exit 2; }
  dir=$(mktemp -d)
  trap 'rm -rf "$dir"' EXIT
  code=0
  unshare --net --uts --mount --pid --fork --mount-proc --kill-child "$0" --inside "$dir" "$@" || code=$?
  exit "$code"
fi
dir=$2 n=$3
shift 3

# --- from here on this is process 1 of the nodes ------------------------------------------------
cat >"$dir/on_node" <<END
#!/usr/bin/env bash
# As ssh does: the words become one line for the node's shell.
host=\$1
shift
exec nsenter --target="\$(<$dir/\$host)" --net --uts --mount --wd="\$PWD" bash -c "\$*"
END
chmod +x "$dir/on_node"
cp /etc/hosts "$dir/hosts"
for ((k = 1; k <= n; k++)); do echo "10.1.0.$k node$k" >>"$dir/hosts"; done
mount --bind "$dir/hosts" /etc/hosts
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
for card in 0 1; do ip link add "net$card" up type bridge; done
for ((k = 1; k <= n; k++)); do
  ip netns add "node$k"
  for card in 0 1; do
    ip link add "to$k-$card" type veth peer name "eth$card" netns "node$k"
    ip link set "to$k-$card" master "net$card" up
  done
  # shellcheck disable=SC2016
  nsenter --net="/run/netns/node$k" unshare --uts --mount bash -c '
    hostname "node$0"
    ip link set lo up
    for card in 0 1; do ip addr add "10.$((card + 1)).0.$0/24" dev "eth$card"; ip link set "eth$card" up; done
    mount -t sysfs sysfs /sys # with these cards
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    echo $$ >"$1/node$0"
    exec sleep infinity' "$k" "$dir" </dev/null &
done
for ((k = 1; k <= n; k++)); do until [[ -s $dir/node$k ]]; do sleep 0.02; done; done

export PATH=$dir:$PATH
export HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC=$dir/on_node                        # MPICH
export PRTE_MCA_plm_ssh_agent=$dir/on_node OMPI_MCA_plm_rsh_agent=$dir/on_node   # Open MPI 5, 4
nsenter --target="$(<"$dir/node1")" --net --uts --mount --wd="$PWD" "$@"
