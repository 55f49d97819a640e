# shellcheck shell=bash
# What jobs/env.sh asks of a scheduler, answered by Flux. A batch script runs in a Flux instance of its own,
# inside the one that it was submitted to.
# shellcheck disable=SC2034,SC2154  # env.sh reads these, and sets others

job_id=$(flux getattr jobid 2>/dev/null) || fail "this is a Flux job: start it with flux batch"
job_nodes=$(flux getattr hostlist)
# The slots, cores of a slot, GPUs of a slot, seconds and name that flux batch was asked for.
read -r slots cores gpus duration job_name < <(flux --parent job info "$job_id" jobspec | python -c '
import json, sys
spec = json.load(sys.stdin)
count = {"node": 1, "slot": 1, "core": 1, "gpu": 0}
def walk(resources):
    for one in resources:
        if one["type"] in count:
            count[one["type"]] = int(one["count"])
        walk(one.get("with", []))
walk(spec["resources"])
system = spec["attributes"]["system"]
name = system.get("job", {}).get("name", "job")
print(count["node"] * count["slot"], count["core"], count["gpu"], int(system.get("duration", 0)), name)')
[[ -n ${job_name:-} ]] || fail "flux job info does not tell what this job was asked for"
: "${HPC_OLDSGD_RUN:=$job_id}" # a job that goes on is a new job, and keeps the first one's folder
run_id=$HPC_OLDSGD_RUN
restarts=${HPC_OLDSGD_STARTS:-0}
: "${HPC_OLDSGD_LAUNCHER:=flux}"
export OMP_NUM_THREADS=$cores

time_limit() { ((duration == 0)) || echo "$duration"; } # in seconds
own_warning() { echo 120; }
warn_before_limit() { warn_in "$1"; }
more_time() { echo "flux batch -t"; }
less_warning() { echo "HPC_OLDSGD_WARNING=20 flux batch"; }
more_tasks() { echo "flux batch -n $1"; } # N

all_tasks() { echo "$slots"; }
# MPICH, MVAPICH and Intel MPI find Flux by themselves. Open MPI 5 needs the plugin flux-pmix.
by_scheduler() { # N
  [[ $HPC_OLDSGD_LAUNCHER == flux ]] || fail "HPC_OLDSGD_LAUNCHER is flux or mpirun, not $HPC_OLDSGD_LAUNCHER"
  start=(flux run -n "$1" -c "$cores")
  ((gpus == 0)) || start+=(-g "$gpus")
  if [[ $HPC_OLDSGD_MPI == auto ]]; then
    HPC_OLDSGD_MPI=$(mpi_version) || exit
    [[ $HPC_OLDSGD_MPI == *"Open MPI"* ]] && HPC_OLDSGD_MPI=pmix || HPC_OLDSGD_MPI=simple
  fi
  start+=(-o "pmi=$HPC_OLDSGD_MPI")
}
pass_on() { # flux run does not pass USR1 on; the job may not have started yet
  local running
  [[ $HPC_OLDSGD_LAUNCHER == flux ]] || { kill -USR1 "$child"; return; }
  for _ in {1..100}; do
    running=$(flux jobs --no-header --filter=running --format='{id}')
    # shellcheck disable=SC2086
    [[ -z $running ]] || flux job kill --signal=USR1 $running && return
    kill -0 "$child" 2>/dev/null || return
    sleep 0.1
  done
}
by_mpirun() { start=(mpirun -n "$1"); }
sweep() { :; }

preempted() { false; }

# The same job once more, in the instance that this one was submitted to.
put_back() {
  export HPC_OLDSGD_STARTS=$((restarts + 1)) HPC_OLDSGD_RUN
  local options=(-n "$slots" -c "$cores" --job-name="$job_name")
  ((gpus == 0)) || options+=(-g "$gpus")
  ((duration == 0)) || options+=(-t "${duration}s")
  flux --parent batch "${options[@]}" "$jobs/$job_script" ${arguments[@]+"${arguments[@]}"}
}
