# shellcheck shell=bash
# What jobs/env.sh asks of a scheduler, answered by Slurm. The other files of this folder answer the same.
# shellcheck disable=SC2034,SC2154  # env.sh reads these, and sets others

unset SLURM_EXPORT_ENV # set by sbatch --export=NONE: with it srun would pass on nothing, not even PATH
[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is a Slurm job: start it with sbatch"
job_id=$SLURM_JOB_ID
run_id=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID} # the same for all members of an array
job_name=${SLURM_JOB_NAME:-job}
job_nodes=${SLURM_JOB_NODELIST:-}
restarts=${SLURM_RESTART_COUNT:-0}
: "${HPC_OLDSGD_LAUNCHER:=srun}"
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# The job's time limit as Slurm writes it: 5:00, 8:00:00, 1-00:00:00, UNLIMITED.
time_limit() { squeue --noheader --jobs="$SLURM_JOB_ID" --format=%l 2>/dev/null | head -n 1; }

# Slurm itself warns this shell, so many seconds before. What --signal sbatch was given is not to be seen
# here. The script's own line is.
own_warning() { sed -n 's/^#SBATCH --signal=.*@//p' "$script" 2>/dev/null; }
warn_before_limit() { :; }
more_time() { echo "sbatch --time"; }
less_warning() { echo "HPC_OLDSGD_WARNING=20 sbatch --signal=B:USR1@20"; }
more_tasks() { echo "sbatch --ntasks=$1"; } # N

# srun's --mpi for the MPI that mpi4py loads. A wrong one gives N worlds of one rank.
choose_mpi() {
  local version
  version=$(mpi_version) || exit
  case $version in
    *"Open MPI"*) HPC_OLDSGD_MPI=pmix ;;
    *CRAY*) HPC_OLDSGD_MPI=cray_shasta ;;
    *) HPC_OLDSGD_MPI=pmi2 ;; # MPICH, MVAPICH, Intel MPI
  esac
  # Over UCX MPICH may send addresses in lines that are too long for Slurm, and hang or abort at the start
  # (docs/troubleshooting.md). MPIR_CVAR_CH4_NETMOD=ucx keeps UCX.
  if [[ $version =~ Device:\ +ch4:[^$'\n']*ofi ]]; then
    export MPIR_CVAR_CH4_NETMOD=${MPIR_CVAR_CH4_NETMOD:-ofi}
  fi
}

# How many of the allocation's first nodes are needed for N tasks. Slurm writes tasks per node as 4(x2),1.
nodes_for() { # N
  local left=$1 nodes=0 group each times
  [[ -n ${SLURM_NTASKS:-} ]] || { echo "$1"; return; } # one task per node
  for group in ${SLURM_TASKS_PER_NODE//,/ }; do
    each=${group%%'('*} times=1
    [[ $group != *x* ]] || times=$(tr -dc 0-9 <<<"${group#*x}")
    for (( ; times > 0 && left > 0; times--, nodes++)); do
      left=$((left - each))
    done
  done
  echo "$nodes"
}

all_tasks() { echo "${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES}"; }

by_scheduler() { # N
  [[ $HPC_OLDSGD_LAUNCHER == srun ]] || fail "HPC_OLDSGD_LAUNCHER is srun or mpirun, not $HPC_OLDSGD_LAUNCHER"
  [[ $HPC_OLDSGD_MPI != auto ]] || choose_mpi
  # A step does not inherit --cpus-per-task. --kill-on-bad-exit would kill ranks that are about to exit with
  # the same code, and lose the code. A rank that dies has hpc_oldsgd.launch.dead_rank end the others; where
  # that cannot run, they end after a minute.
  start=(srun --mpi="$HPC_OLDSGD_MPI" --ntasks="$1" --nodes="$(nodes_for "$1")"
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=60
    ${SRUN_OPTIONS[@]+"${SRUN_OPTIONS[@]}"})
}
by_mpirun() { start=(mpirun -n "$1"); } # inside a job mpirun asks Slurm for the nodes

# MPICH names its shared memory after the numbers of job and step, and a requeued job has the same numbers.
# So it would use files that killed ranks left on a node. This removes the user's files that no process maps.
sweep() {
  # shellcheck disable=SC2016
  srun --mpi=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 bash -c '
    for file in /dev/shm/mpich_shm_*; do
      [[ -O $file ]] && ! grep -qsF "$file" /proc/[0-9]*/maps && rm -f "$file"
    done
    true'
}

preempted() { [[ $(scontrol show job "$SLURM_JOB_ID" 2>/dev/null) =~ PreemptTime=[0-9] ]]; }

put_back() {
  local job=$SLURM_JOB_ID
  # One member of an array has the array's own number, which would requeue all members.
  [[ ${SLURM_ARRAY_JOB_ID:-} != "$job" ]] || job+=_$SLURM_ARRAY_TASK_ID
  scontrol requeue "$job"
}

# The check of an array's input. The first member that comes here runs it and notes its exit code. The others wait
# for that. Members that have not started yet are cancelled if the input is bad. If the member that checks is killed,
# the others go on after a while: a run checks its own input too.
check_array() { # FOLDER COMMAND...
  local claim=$1/.check-$SLURM_ARRAY_JOB_ID bad=0
  mkdir -p "$1" || fail "cannot write to $1"
  if mkdir "$claim" 2>/dev/null; then
    "${@:2}" </dev/null || bad=$?
    ((bad != 2)) || scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"
    echo "$bad" >"$claim/new" && mv "$claim/new" "$claim/code"
  fi
  for _ in {1..120}; do
    if [[ -e $claim/code ]]; then
      read -r bad <"$claim/code"
      ((bad != 2)) || fail "bad input (exit code 2): no member of the array is started"
      return 0
    fi
    sleep 1
  done
  say "the member that checks the input has not ended: not waiting any longer"
}

# The tables of an array's runs, by a job that waits for all of it.
collect_later() { # FOLDER
  local options=(--dependency=afterany:"$SLURM_ARRAY_JOB_ID" --partition="$SLURM_JOB_PARTITION")
  local asked_for=$1/.collect-$SLURM_ARRAY_JOB_ID # once for the array, even if it is requeued
  [[ $SLURM_ARRAY_TASK_ID == "$SLURM_ARRAY_TASK_MIN" && ! -e $asked_for ]] || return 0
  [[ -z ${SLURM_JOB_ACCOUNT:-} ]] || options+=(--account="$SLURM_JOB_ACCOUNT")
  if sbatch "${options[@]}" "$jobs/collect.slurm" "$1"; then
    mkdir -p "$1" && touch "$asked_for"
  else
    say "no job for the tables: python -m hpc_oldsgd.study collect $1 makes them when all is done"
  fi
}
