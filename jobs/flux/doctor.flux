#!/usr/bin/env bash
# Measures what this cluster's MPI, network, GPUs and cores do, in under a minute, without a model. For Flux:
#
#   flux batch jobs/flux/doctor.flux
#   flux batch -n 4 -c 4 jobs/flux/doctor.flux --model-bytes 500000000
# flux: --job-name=doctor
# flux: -n 4
# flux: -t 10m
# flux: # -q CHANGE_ME
# flux: --output=doctor-{{id}}.log
job_script=flux/doctor.flux
# shellcheck source=jobs/env.sh
source "${HPC_OLDSGD_HOME:-.}/jobs/env.sh" ||
  { echo "submit from the project's folder, or set HPC_OLDSGD_HOME" >&2; exit 2; }

doctor_job "$@"
