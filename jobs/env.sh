# shellcheck shell=bash
# env.sh: sourced by every job script. Edit the first part once for your site; the scripts share the second.

# --- the site -----------------------------------------------------------------------------------
# source /etc/profile.d/modules.sh              # if your login shell is not bash: makes `module` known
# module purge                                  # CHANGE_ME: the modules that mpi4py was built with
# module load gcc openmpi cuda
: "${HPC_OLDSGD_HOME:=$PWD}"                    # the project's folder
: "${HPC_OLDSGD_VENV=$HPC_OLDSGD_HOME/.venv}"   # the virtual environment; empty: python is in PATH
: "${HPC_OLDSGD_LAUNCHER:=srun}"                # srun or mpirun
: "${HPC_OLDSGD_MPI:=auto}"                     # srun's --mpi; auto: what fits mpi4py's MPI
: "${HPC_OLDSGD_RESTARTS:=100}"                 # how often a job is requeued at most
: "${HPC_OLDSGD_RETRIES:=2}"                    # how often a run that a signal ended is started again
SRUN_OPTIONS=(--cpu-bind=cores)
MPIRUN_OPTIONS=()                               # Open MPI, several ranks on a core: --bind-to none
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# export HPC_OLDSGD_DATA=/scratch/$USER/data    # CHANGE_ME: where CIFAR-10 and WikiText-2 are

# --- what the scripts share ---------------------------------------------------------------------
set -uo pipefail
unset SLURM_EXPORT_ENV # set by sbatch --export=NONE: with it srun would pass on nothing, not even PATH
say() { echo "$(date +%T) ${SLURM_JOB_NAME:-job}: $*"; }
fail() { say "$*" >&2; exit 2; }

[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is a Slurm job: start it with sbatch"
for count in RESTARTS RETRIES; do
  name=HPC_OLDSGD_$count
  [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name is a whole number, not ${!name}"
done
if [[ -n $HPC_OLDSGD_VENV ]]; then
  PATH=$HPC_OLDSGD_VENV/bin:$PATH
  [[ -x $HPC_OLDSGD_VENV/bin/python ]] ||
    fail "no python in $HPC_OLDSGD_VENV: make setup makes it, HPC_OLDSGD_VENV names another"
fi
say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"

# The job's time limit as Slurm writes it: 5:00, 8:00:00, 1-00:00:00, UNLIMITED.
time_limit() { squeue --noheader --jobs="$SLURM_JOB_ID" --format=%l 2>/dev/null | head -n 1; }

# A limit that is not longer than the warning before it: the warning would come at once, at every start.
# What --signal sbatch was given is not to be seen here. The script's own line is.
check_limit() { # SCRIPT
  local limit days=0 seconds=0 part parts warning
  warning=${HPC_OLDSGD_WARNING:-$(sed -n 's/^#SBATCH --signal=.*@//p' "$1" 2>/dev/null)}
  limit=$(time_limit) || return 0
  [[ $limit =~ ^([0-9]+-)?[0-9:]+$ && $warning =~ ^[0-9]+$ ]] || return 0
  [[ $limit != *-* ]] || days=${limit%%-*}
  IFS=: read -ra parts <<<"${limit#*-}"
  for part in "${parts[@]}"; do seconds=$((seconds * 60 + 10#$part)); done
  ((days * 86400 + seconds > warning)) ||
    fail "the time limit of $limit is not longer than the $warning s of warning before it: ask for more with" \
      "sbatch --time, or for less warning with HPC_OLDSGD_WARNING=20 sbatch --signal=B:USR1@20"
}
check_limit "${BASH_SOURCE[1]:-}"

# The folder for everything that a script writes. It is the same after a requeue, and after a resubmission
# with HPC_OLDSGD_OUT, which then continues where the first submission ended.
out_folder() { # NAME
  echo "${HPC_OLDSGD_OUT:-runs/$1-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}"
}

# srun's --mpi for the MPI that mpi4py loads. A wrong one gives N worlds of one rank.
choose_mpi() {
  local version
  version=$(python -m mpi4py --mpi-lib-version | tr -d '\0') || fail "mpi4py finds no MPI: load its module in jobs/env.sh"
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

start=(env) # what comes before a command: nothing, until `tasks` sets it

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

# How many tasks the allocation has.
all_tasks() { echo "${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES}"; }

# From now on commands start on N tasks of the allocation, filling its first nodes first.
tasks() { # N
  [[ $1 =~ ^[1-9][0-9]*$ ]] || fail "the number of agents is a whole number, not $1"
  local all
  all=$(all_tasks)
  (($1 <= all)) || fail "$1 agents need sbatch --ntasks=$1, the allocation has $all"
  case $HPC_OLDSGD_LAUNCHER in
    srun)
      [[ $HPC_OLDSGD_MPI != auto ]] || choose_mpi
      # A step does not inherit --cpus-per-task. --kill-on-bad-exit would kill ranks that are about to exit with
      # the same code, and lose the code. A rank that dies has hpc_oldsgd.launch.dead_rank end the others; where
      # that cannot run, they end after a minute.
      start=(srun --mpi="$HPC_OLDSGD_MPI" --ntasks="$1" --nodes="$(nodes_for "$1")"
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=60
        ${SRUN_OPTIONS[@]+"${SRUN_OPTIONS[@]}"})
      ;;
    mpirun) start=(mpirun -n "$1" ${MPIRUN_OPTIONS[@]+"${MPIRUN_OPTIONS[@]}"}) ;;
    *) fail "HPC_OLDSGD_LAUNCHER is srun or mpirun, not $HPC_OLDSGD_LAUNCHER" ;;
  esac
}

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

# All tasks of the allocation must form one MPI world. N worlds of one rank each are an error.
check_world() {
  local n left=$HPC_OLDSGD_RETRIES greetings
  n=$(all_tasks)
  tasks "$n"
  [[ -z ${SLURM_RESTART_COUNT:-} ]] || sweep
  until greetings=$("${start[@]}" python -m mpi4py.bench helloworld </dev/null); do
    ((left-- > 0)) ||
      fail "${start[*]} cannot start MPI programs: set HPC_OLDSGD_MPI or HPC_OLDSGD_LAUNCHER in jobs/env.sh"
    say "MPI did not start: once more"
  done
  (($(grep -c " of $n on " <<<"$greetings") == n)) ||
    fail "${start[*]} started no world of $n ranks but: $(sort <<<"$greetings" | uniq -c | head -n 3)" \
      "(mpi4py and the launcher belong to different MPIs: set HPC_OLDSGD_MPI in jobs/env.sh)"
  say "one world of $n ranks by ${start[*]}"
}

# One process checks options, data and folder before all tasks start: bad input costs seconds.
check() { # OPTION... of hpc_oldsgd.train
  python -m hpc_oldsgd.train "$@" --check </dev/null || exit
}

# --- running, stopping, resuming ----------------------------------------------------------------
# Before the time limit, or at a preemption, Slurm sends USR1 to this shell only. The shell passes it to srun
# or mpirun, and so to all ranks. They write a checkpoint and exit with 75.
child='' asked='' signalled=''
trap 'asked=1 signalled=1; [[ -z $child ]] || kill -USR1 "$child"' USR1

# Runs a command to its end and leaves its exit code in `code`. The command runs in the background, because
# bash runs a trap only while it waits.
run() { # COMMAND...
  local got
  "${start[@]}" "$@" </dev/null &
  child=$! code=127
  [[ -z $asked ]] || kill -USR1 "$child" # the signal came before the child was known
  while :; do
    signalled=''
    wait "$child"
    got=$?
    ((got == 127)) || code=$got # 127: the child had already been waited for when the signal came
    [[ -n $signalled ]] || break
  done
  ((code < 5 || code > 15)) || code=$((code + 128)) # MPICH's mpirun reports a signal this way; none of our codes is in this range
  child=''
}

# Whether this start of the job has brought a run further: to a new checkpoint, or to its end.
added=''

# The checkpoints in the folder that a command writes to; one word if it names no folder.
saved() { # COMMAND...
  local folder=''
  while (($#)); do
    case $1 in
      --out) folder=${2:-} ;;
      --out=*) folder=${1#*=} ;;
    esac
    shift
  done
  [[ -n $folder ]] || { echo unknown; return; }
  (cd "$folder/checkpoints" 2>/dev/null && shopt -s nullglob && echo round-*/manifest.json)
}

# The same for a command that can resume. A stopped command continues when the job starts again. A signal
# that came before its handler was installed has killed it, which loses nothing either.
resumable() { # COMMAND...
  local left=$HPC_OLDSGD_RETRIES before now
  while :; do
    before=$(saved "$@")
    [[ -z $asked ]] || go_on_later
    run "$@"
    now=$(saved "$@")
    if ((code == 0 || code == 3)) || [[ $now != "$before" || $now == unknown ]]; then added=1; fi
    if ((code == 75)) || { [[ -n $asked ]] && ((code > 128)); }; then
      go_on_later
    fi
    # Nobody asked to stop: the start of MPI sometimes fails by chance (docs/troubleshooting.md).
    ((code > 128 && left-- > 0)) || break
    say "a signal ended it (exit code $code): once more, from its checkpoint where it has one"
    sweep
  done
}

# A job that is preempted may have had no time. Any other would come no further the next time either.
go_on_later() {
  [[ -n $added || $(scontrol show job "$SLURM_JOB_ID" 2>/dev/null) =~ PreemptTime=[0-9] ]] ||
    fail "stopped $SECONDS s after its start, with a time limit of $(time_limit || echo '?'), before it added a" \
      "checkpoint: the job is not requeued. Submit it again with the same folder and a longer sbatch --time"
  requeue
}

requeue() {
  ((${SLURM_RESTART_COUNT:-0} < HPC_OLDSGD_RESTARTS)) || fail "requeued $SLURM_RESTART_COUNT times: giving up"
  local job=$SLURM_JOB_ID
  # One member of an array has the array's own number, which would requeue all members.
  [[ ${SLURM_ARRAY_JOB_ID:-} != "$job" ]] || job+=_$SLURM_ARRAY_TASK_ID
  say "stopped: the job is requeued${added:+ and goes on from its checkpoint}"
  scontrol requeue "$job" || fail "the job cannot be requeued here: submit it again with the same folder"
  exit 75
}

# A run in its own folder that is done once: a finished or diverged run is not run again. If it fails, its
# exit code is kept in `failed` for the end of the job, and the next runs still start.
failed=0
# shellcheck disable=SC2034
once() { # FOLDER COMMAND...
  local own=$1
  shift
  if [[ -e $own/summary.json || -e $own/diverged ]]; then
    say "$own is done"
    return
  fi
  resumable "$@" --out "$own" --resume auto
  case $code in
    0) ;;
    2) fail "bad input (exit code 2): nothing more is started" ;;
    3) touch "$own/diverged" ;; # divergence is a result too
    *) say "failed with exit code $code: $*" >&2; failed=$code ;;
  esac
}

# The step size for N agents by the rule, as an option; nothing for fixed.
alpha_for() { # N
  case ${HPC_OLDSGD_ALPHA_RULE:-fixed} in
    fixed) ;;
    sqrt | linear)
      [[ -n ${HPC_OLDSGD_ALPHA:-} ]] || fail "HPC_OLDSGD_ALPHA_RULE=$HPC_OLDSGD_ALPHA_RULE needs HPC_OLDSGD_ALPHA, one agent's step size"
      awk -v a="$HPC_OLDSGD_ALPHA" -v n="$1" -v rule="$HPC_OLDSGD_ALPHA_RULE" \
        'BEGIN { printf "--alpha %.6g\n", a * (rule == "linear" ? n : sqrt(n)) }'
      ;;
    *) fail "HPC_OLDSGD_ALPHA_RULE is fixed, sqrt or linear, not $HPC_OLDSGD_ALPHA_RULE" ;;
  esac
}

# Tables and figures of a folder of runs: now, or by a job that waits for this whole array.
# An earlier failure stays the job's exit code.
collect() { # FOLDER [OPTION...]
  local bad
  python -m hpc_oldsgd.study collect "$@" || { bad=$?; ((failed)) || failed=$bad; }
}
collect_later() { # FOLDER
  local options=(--dependency=afterany:"$SLURM_ARRAY_JOB_ID" --partition="$SLURM_JOB_PARTITION")
  local asked_for=$1/.collect-$SLURM_ARRAY_JOB_ID # once for the array, even if it is requeued
  [[ $SLURM_ARRAY_TASK_ID == "$SLURM_ARRAY_TASK_MIN" && ! -e $asked_for ]] || return 0
  [[ -z ${SLURM_JOB_ACCOUNT:-} ]] || options+=(--account="$SLURM_JOB_ACCOUNT")
  if sbatch "${options[@]}" "$HPC_OLDSGD_HOME/jobs/collect.slurm" "$1"; then
    mkdir -p "$1" && touch "$asked_for"
  else
    say "no job for the tables: python -m hpc_oldsgd.study collect $1 makes them when all is done"
  fi
}
