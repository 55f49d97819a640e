#!/usr/bin/env bash
# How training scales over a ring of 2, 4, 8, 16 and 32 agents, tau = 5. Ends with tables and figures. For Flux:
#
#   flux batch jobs/flux/scaling_ring.flux
#   flux batch -n 32 -c 4 jobs/flux/scaling_ring.flux --task digits
#
# Near its time limit the job writes a checkpoint, goes back into the queue and resumes.
# flux: --job-name=scaling-ring
# flux: -n 32
# flux: -t 8h
# flux: # -q CHANGE_ME
# flux: --output=scaling-ring-{{id}}.log
job_script=flux/scaling_ring.flux
# shellcheck source=jobs/env.sh
source "${HPC_OLDSGD_HOME:-.}/jobs/env.sh" ||
  { echo "submit from the project's folder, or set HPC_OLDSGD_HOME" >&2; exit 2; }

scaling_ring_job "$@"
