# shellcheck shell=bash
# What jobs/env.sh asks of a scheduler, answered by IBM Spectrum LSF.
# shellcheck disable=SC2034,SC2154  # env.sh reads these, and sets others

[[ -n ${LSB_JOBID:-} ]] || fail "this is an LSF job: start it with bsub"
job_id=$LSB_JOBID
job_name=${LSB_JOBNAME:-job}
job_nodes=$(sort -u "$LSB_DJOB_HOSTFILE" | tr '\n' ' ')
run_id=$LSB_JOBID
# LSF does not tell how often it has requeued a job, so the job keeps a line for each time, where it was submitted.
stops=.requeued-$LSB_JOBID
restarts=0
[[ ! -e $stops ]] || restarts=$(wc -l <"$stops")
: "${HPC_OLDSGD_LAUNCHER:=mpirun}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# As 01:00:00, or as minutes and a host: 60.0/host.
time_limit() {
  local limit
  limit=$(bjobs -noheader -hms -o runtimelimit "$LSB_JOBID" 2>/dev/null) || return
  [[ $limit != *.*/* ]] || limit=${limit%%.*}:00
  echo "$limit"
}
own_warning() { echo 120; }
warn_before_limit() { warn_in "$1"; }
more_time() { echo "bsub -W"; }
less_warning() { echo "HPC_OLDSGD_WARNING=20 bsub"; }
more_tasks() { echo "bsub -n $1"; } # N

all_tasks() { wc -l <"$LSB_DJOB_HOSTFILE"; }
by_scheduler() { fail "HPC_OLDSGD_LAUNCHER is mpirun under LSF, not $HPC_OLDSGD_LAUNCHER"; }
by_mpirun() { mpirun_on "$1" "$LSB_DJOB_HOSTFILE" blaunch; }
sweep() { :; }

preempted() { false; } # LSF suspends a job, or kills it without a warning
put_back() { date >>"$stops"; } # the exit code 75 does it: #BSUB -Q "75"
