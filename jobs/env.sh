# shellcheck shell=bash
# env.sh: sourced by every job script. Edit the first part once for your site; the scripts share the second.
# What differs between Slurm, PBS, LSF and Flux is in the folder schedulers.

# --- the site -----------------------------------------------------------------------------------
# source /etc/profile.d/modules.sh              # if your login shell is not bash: makes `module` known
# module purge                                  # CHANGE_ME: the modules that mpi4py was built with
# module load gcc openmpi cuda
: "${HPC_OLDSGD_HOME:=$PWD}"                    # the project's folder
: "${HPC_OLDSGD_VENV=$HPC_OLDSGD_HOME/.venv}"   # the virtual environment; empty: python is in PATH
# : "${HPC_OLDSGD_LAUNCHER:=mpirun}"            # Slurm: srun or mpirun; Flux: flux or mpirun; others: mpirun
: "${HPC_OLDSGD_MPI:=auto}"                     # srun's --mpi; auto: what fits mpi4py's MPI
: "${HPC_OLDSGD_RESTARTS:=100}"                 # how often a job is requeued at most
: "${HPC_OLDSGD_RETRIES:=2}"                    # how often a run that a signal ended is started again
SRUN_OPTIONS=(--cpu-bind=cores)
MPIRUN_OPTIONS=()                               # Open MPI, several ranks on a core: --bind-to none
# export HPC_OLDSGD_DATA=/scratch/$USER/data    # CHANGE_ME: where CIFAR-10 and WikiText-2 are

# --- what the scripts share ---------------------------------------------------------------------
set -uo pipefail
say() { echo "$(date +%T) ${job_name:-job}: $*"; }
fail() { say "$*" >&2; exit 2; }

for count in RESTARTS RETRIES; do
  name=HPC_OLDSGD_$count
  [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name is a whole number, not ${!name}"
done
if [[ -n $HPC_OLDSGD_VENV ]]; then
  PATH=$HPC_OLDSGD_VENV/bin:$PATH
  [[ -x $HPC_OLDSGD_VENV/bin/python ]] ||
    fail "no python in $HPC_OLDSGD_VENV: make setup makes it, HPC_OLDSGD_VENV names another"
fi
jobs=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=${BASH_SOURCE[1]:-} # that sources this file; a copy of it, if the scheduler made one
start=(env)                # what comes before a command: nothing, until `tasks` sets it
child='' asked='' signalled=''
pass_on() { kill -USR1 "$child"; } # the signal, to all ranks

# What the MPI that mpi4py loads says of itself.
mpi_version() {
  python -m mpi4py --mpi-lib-version | tr -d '\0' || fail "mpi4py finds no MPI: load its module in jobs/env.sh"
}

# mpirun on the first N lines of a file that names a host for each task. AGENT starts a command on a host as
# ssh does, and by it the scheduler knows all processes of the job.
mpirun_on() { # N FILE AGENT
  if command -v "$3" >/dev/null; then
    export HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC=$3                     # MPICH, MVAPICH
    export I_MPI_HYDRA_BOOTSTRAP=rsh I_MPI_HYDRA_BOOTSTRAP_EXEC=$3       # Intel MPI
    export PRTE_MCA_plm_ssh_agent=$3 OMPI_MCA_plm_rsh_agent=$3           # Open MPI 5, 4
  fi
  start=(mpirun -n "$1" --hostfile "$2")
  # Open MPI passes on only its own variables.
  [[ $(mpirun --version 2>&1) == *"Open MPI"* ]] || return 0
  local name
  for name in $(compgen -e); do
    [[ ! $name =~ ^(OMP_NUM_THREADS|PYTHONPATH|MPI4PY_LIBMPI|HPC_OLDSGD_.*|FI_.*|UCX_.*)$ ]] || start+=(-x "$name")
  done
}

# Options for the program: after the script's name, or where that cannot be (qsub, bsub <) in a variable.
read -ra arguments <<<"${HPC_OLDSGD_ARGS:-}"
arguments+=("$@")

: "${job_script:=slurm}" # other scripts set it: pbs/train.pbs
# shellcheck source=jobs/schedulers/slurm.sh
source "$jobs/schedulers/${job_script%%/*}.sh" || fail "there is no $jobs/schedulers/${job_script%%/*}.sh"
[[ $restarts =~ ^[0-9]+$ ]] || fail "the number of earlier starts is a whole number, not $restarts"
say "job $job_id on $job_nodes, start $((restarts + 1))"

# A limit that is not longer than the warning before it: the warning would come at once, at every start.
check_limit() {
  local limit days=0 seconds=0 part parts warning
  warning=${HPC_OLDSGD_WARNING:-$(own_warning)}
  limit=$(time_limit) || return 0
  [[ $limit =~ ^([0-9]+-)?[0-9:]+$ && $warning =~ ^[0-9]+$ ]] || return 0
  [[ $limit != *-* ]] || days=${limit%%-*}
  IFS=: read -ra parts <<<"${limit#*-}"
  for part in "${parts[@]}"; do seconds=$((seconds * 60 + 10#$part)); done
  ((seconds += days * 86400, seconds > warning)) ||
    fail "the time limit of $limit is not longer than the $warning s of warning before it: ask for more with" \
      "$(more_time), or for less warning with $(less_warning)"
  warn_before_limit $((seconds - warning))
}

# For schedulers that send no warning of their own: this shell gets it after so many seconds. What waits sees
# the end of its input when this shell ends, and ends too.
warn_in() { # SECONDS
  # shellcheck disable=SC2034
  exec {alive}> >(exec >/dev/null 2>&1; read -rt "$1" _; (($? > 128)) && kill -USR1 $$)
}

# The folder for everything that a script writes. It is the same after a requeue, and after a resubmission
# with HPC_OLDSGD_OUT, which then continues where the first submission ended.
out_folder() { # NAME
  echo "${HPC_OLDSGD_OUT:-runs/$1-$run_id}"
}

# From now on commands start on N tasks of the allocation, filling its first nodes first.
tasks() { # N
  [[ $1 =~ ^[1-9][0-9]*$ ]] || fail "the number of agents is a whole number, not $1"
  local all
  all=$(all_tasks)
  (($1 <= all)) || fail "$1 agents need $(more_tasks "$1"), the allocation has $all"
  if [[ $HPC_OLDSGD_LAUNCHER == mpirun ]]; then
    by_mpirun "$1"
    start+=(${MPIRUN_OPTIONS[@]+"${MPIRUN_OPTIONS[@]}"})
  else
    by_scheduler "$1"
  fi
}

# All tasks of the allocation must form one MPI world. N worlds of one rank each are an error.
check_world() {
  local n left=$HPC_OLDSGD_RETRIES greetings
  n=$(all_tasks)
  tasks "$n"
  ((restarts == 0)) || sweep
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
check_options() { # COMMAND...: a measurement has only options
  "$@" --check-agents "$(all_tasks)" </dev/null || exit
}

# --- running, stopping, resuming ----------------------------------------------------------------
# Before the time limit, or at a preemption, this shell alone gets USR1. It passes the signal to srun or mpirun,
# and so to all ranks. They write a checkpoint and exit with 75.
trap 'asked=1 signalled=1; [[ -z $child ]] || pass_on' USR1

# Runs a command to its end and leaves its exit code in `code`. The command runs in the background, because
# bash runs a trap only while it waits.
run() { # COMMAND...
  local got
  "${start[@]}" "$@" </dev/null &
  child=$! code=127
  [[ -z $asked ]] || pass_on # the signal came before the child was known
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
  [[ -n $added ]] || preempted ||
    fail "stopped $SECONDS s after its start, with a time limit of $(time_limit || echo '?'), before it added a" \
      "checkpoint: the job is not requeued. Submit it again with the same folder and a longer $(more_time)"
  requeue
}

requeue() {
  ((restarts < HPC_OLDSGD_RESTARTS)) || fail "requeued $restarts times: giving up"
  say "stopped: the job is requeued${added:+ and goes on from its checkpoint}"
  put_back || fail "the job cannot be requeued here: submit it again with the same folder"
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

# Tables and figures of a folder of runs. An earlier failure stays the job's exit code.
collect() { # FOLDER [OPTION...]
  local bad
  python -m hpc_oldsgd.study collect "$@" || { bad=$?; ((failed)) || failed=$bad; }
}

# --- the jobs that every scheduler has a script for ----------------------------------------------
doctor_job() { # OPTION...
  check_options python -m hpc_oldsgd.doctor "$@"
  check_world
  run python -m hpc_oldsgd.doctor "$@"
  exit "$code"
}

train_job() { # OPTION...
  local folder
  folder=$(out_folder train)
  check --out "$folder" --resume auto "$@" --check-agents "$(all_tasks)"
  check_world
  resumable python -m hpc_oldsgd.train --out "$folder" --resume auto "$@"
  exit "$code"
}

scaling_ring_job() { # OPTION...
  local sizes n folder alpha options=(--topology ring --tau 5 --task cifar10-vgg11)
  read -ra sizes <<<"${HPC_OLDSGD_SIZES:-2 4 8 16 32}"
  for n in "${sizes[@]}"; do tasks "$n"; done # check that all fit before the first hours are spent
  folder=$(out_folder scaling-ring)
  alpha=$(alpha_for 1) || exit
  # shellcheck disable=SC2086
  check "${options[@]}" $alpha "$@" --out "$folder/check" --check-agents "${sizes[@]}"
  check_world
  for n in "${sizes[@]}"; do
    tasks "$n"
    alpha=$(alpha_for "$n") || exit
    # shellcheck disable=SC2086
    once "$folder/n$n${alpha:+-${alpha#--alpha }}" python -m hpc_oldsgd.train "${options[@]}" $alpha "$@"
  done
  collect "$folder"
  exit "$failed"
}

# The signal may come from now on, so this is last.
check_limit
