# shellcheck shell=bash
# What jobs/env.sh asks of a scheduler, answered by OpenPBS and PBS Pro.
# shellcheck disable=SC2034,SC2154  # env.sh reads these, and sets others

[[ -n ${PBS_JOBID:-} ]] || fail "this is a PBS job: start it with qsub"
job_id=$PBS_JOBID
job_name=${PBS_JOBNAME:-job}
job_nodes=$(sort -u "$PBS_NODEFILE" | tr '\n' ' ')
# A job that goes on is a new job. It keeps the first one's number for its folder.
: "${HPC_OLDSGD_RUN:=${PBS_JOBID%%.*}}"
run_id=$HPC_OLDSGD_RUN
restarts=${HPC_OLDSGD_STARTS:-0}
: "${HPC_OLDSGD_LAUNCHER:=mpirun}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # PBS sets it: ompthreads, or ncpus of a chunk

# One line of `qstat -f`, such as Resource_List.walltime = 01:00:00.
attribute() { qstat -fw "$PBS_JOBID" 2>/dev/null | sed -n "s/^ *$1 = //p" | head -n 1; } # NAME

time_limit() { attribute Resource_List.walltime; }
own_warning() { echo 120; }
warn_before_limit() { warn_in "$1"; } # PBS sends nothing before the limit
more_time() { echo "qsub -l walltime"; }
less_warning() { echo "qsub -v HPC_OLDSGD_WARNING=20"; }
more_tasks() { echo "qsub -l select=$1:ncpus=1:mpiprocs=1"; } # N

all_tasks() { wc -l <"$PBS_NODEFILE"; }
by_scheduler() { fail "HPC_OLDSGD_LAUNCHER is mpirun under PBS, not $HPC_OLDSGD_LAUNCHER"; }
by_mpirun() { mpirun_on "$1" "$PBS_NODEFILE" pbs_tmrsh; }
sweep() { :; } # no two jobs have the same number

# A job that PBS itself requeues is killed without a warning, so nobody asks.
preempted() { false; }

# Users may not rerun a job of theirs (qrerun is for operators), so the same job is submitted once more.
put_back() {
  local name option value options=()
  for name in select place walltime; do
    value=$(attribute "Resource_List.$name")
    [[ -z $value ]] || options+=(-l "$name=$value")
  done
  for option in q:queue A:Account_Name P:project; do
    value=$(attribute "${option#*:}")
    [[ -z $value || $value == _pbs_project_default ]] || options+=("-${option%%:*}" "$value")
  done
  export HPC_OLDSGD_STARTS=$((restarts + 1)) HPC_OLDSGD_RUN
  local names=("${!HPC_OLDSGD_@}")
  (cd "${PBS_O_WORKDIR:-.}" && IFS=, &&
    qsub -N "$job_name" "${options[@]}" -v "${names[*]}" "$jobs/$job_script")
}
