#!/usr/bin/env bash
# One run over MPI, one agent per task. For Flux:
#
#   flux batch jobs/flux/train.flux
#   flux batch -n 9 -c 4 jobs/flux/train.flux --task digits --tau 10
#
# Near its time limit the job writes a checkpoint, goes back into the queue and resumes.
# flux: --job-name=train
# flux: -n 9
# flux: -t 1h
# flux: # -q CHANGE_ME
# flux: --output=train-{{id}}.log
job_script=flux/train.flux
# shellcheck source=jobs/env.sh
source "${HPC_OLDSGD_HOME:-.}/jobs/env.sh" ||
  { echo "submit from the project's folder, or set HPC_OLDSGD_HOME" >&2; exit 2; }

train_job "$@"
