#!/usr/bin/env bash
# cluster.sh COMMAND...: runs a command inside a Slurm cluster of its own, which ends with the command.
#
#   sudo tests/slurm/cluster.sh bash                 a shell with sbatch, srun, squeue, ...
#
# Two nodes with pretended cores and GPUs, all daemons on this machine, in their own process, network,
# mount and host name namespaces: nothing outside is touched, several clusters do not meet, and when the
# command ends the kernel ends every daemon, job and rank with it. Core binding and memory limits are
# not enforced. Partitions: batch; low, whose jobs batch preempts with a grace time; scrap, whose jobs it
# requeues at once. From the environment:
#   CLUSTER_DIR      configuration, state and logs; a temporary folder, removed at the end, if not set
#   CLUSTER_NODES    2      CLUSTER_CPUS    32 a node      CLUSTER_GPUS    4 a node
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

if [[ ${1:-} != --inside ]]; then
  (($#)) || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }
  for program in slurmctld slurmd munged ip unshare; do
    command -v "$program" >/dev/null || { echo "cluster.sh: no $program: make test-deps installs it" >&2; exit 2; }
  done
  ((EUID == 0)) || { echo "cluster.sh: Slurm's daemons and the namespaces need root" >&2; exit 2; }
  if [[ -z ${CLUSTER_DIR:-} ]]; then
    CLUSTER_DIR=$(mktemp -d)
    trap 'rm -rf "$CLUSTER_DIR"' EXIT
  fi
  export CLUSTER_DIR
  code=0
  # --kill-child: whoever ends this script ends the cluster.
  unshare --net --uts --mount --pid --fork --mount-proc --kill-child "$0" --inside "$@" || code=$?
  exit "$code"
fi
shift

# --- from here on this is process 1 of the cluster ----------------------------------------------
dir=$(realpath "$CLUSTER_DIR") nodes=${CLUSTER_NODES:-2} cpus=${CLUSTER_CPUS:-32} gpus=${CLUSTER_GPUS:-4}
export SLURM_CONF=$dir/slurm.conf
umask 022
mkdir -p "$dir"/{run,log,state,dev}
all=n1
((nodes == 1)) || all="n[1-$nodes]"

cat >"$SLURM_CONF" <<END
ClusterName=throwaway
SlurmctldHost=n0
SlurmUser=root
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it may start again.
AuthInfo=socket=$dir/run/munge.socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
TmpFS=$dir/tmp.%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
MailProg=/bin/true
# A bare srun starts ranks that do not know of each other, as at many sites.
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=5
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/log/jobcomp.log
MinJobAge=3600
GresTypes=gpu
PartitionName=batch Nodes=$all Default=YES DefaultTime=10 PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=$all DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=scrap Nodes=$all DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE
END
cp /etc/hosts "$dir/hosts"
for ((k = 0; k <= nodes; k++)); do
  echo "10.0.0.$((k + 1)) n$k" >>"$dir/hosts"
done
for ((k = 1; k <= nodes; k++)); do
  mkdir -p "$dir/spool.n$k" "$dir/tmp.n$k"
  # One host name each: Debian's build allows one slurmd per NodeHostname.
  echo "NodeName=n$k NodeHostname=n$k NodeAddr=n$k Port=$((17000 + k)) Sockets=1 CoresPerSocket=$cpus" \
    "ThreadsPerCore=1 RealMemory=262144 Gres=gpu:$gpus" >>"$SLURM_CONF"
done
# A count alone gives no GPUs: each needs a device file of its own.
for ((k = 0; k < gpus; k++)); do ln -sf /dev/null "$dir/dev/gpu$k"; done
echo "NodeName=$all Name=gpu File=$dir/dev/gpu[0-$((gpus - 1))]" >"$dir/gres.conf"

ip link set lo up
ip link add net0 type bridge
ip addr add 10.0.0.1/24 dev net0
ip link set net0 up
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
hostname n0
mount --bind "$dir/hosts" /etc/hosts
(umask 377 && head -c 1024 /dev/urandom >"$dir/run/munge.key")
# --force: the folder may be private, all jobs here are root's.
munged --force --key-file="$dir/run/munge.key" --socket="$dir/run/munge.socket" --pid-file="$dir/run/munged.pid" \
  --log-file="$dir/log/munged.log" --seed-file="$dir/run/munge.seed" </dev/null
slurmctld </dev/null >"$dir/log/slurmctld.out" 2>&1
for ((k = 1; k <= nodes; k++)); do
  ip netns add "n$k"
  ip link add "to-n$k" type veth peer name eth0 netns "n$k"
  ip link set "to-n$k" master net0 up
  # A node has its own network card, host name and shared memory. PMIX_HOSTNAME must be the node's name,
  # or Open MPI 5 fails from the third rank on.
  # shellcheck disable=SC2016
  PMIX_HOSTNAME=n$k nsenter --net="/run/netns/n$k" unshare --uts --mount bash -c '
    ip link set lo up; ip addr add "$1/24" dev eth0; ip link set eth0 up; hostname "$0"
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm; exec slurmd -N "$0"' "n$k" "10.0.0.$((k + 1))" \
    </dev/null >"$dir/log/slurmd.n$k.out" 2>&1
done
for ((k = 0; k < 200; k++)); do
  idle=$(sinfo -hN -p batch -t idle -o %N 2>/dev/null | wc -l)
  ((idle == nodes)) && break
  sleep 0.1
done
if ((idle != nodes)); then
  tail -n 5 "$dir"/log/*.log >&2
  echo "cluster.sh: the nodes did not become idle" >&2
  exit 1
fi
"$@"
