#!/usr/bin/env bash
# rank.sh LOGS COMMAND...: rank 0 prints, every other rank writes LOGS/rank-N.log.
logs=$1
shift
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${SLURM_PROCID:-0}}}}
if [[ $rank == 0 ]]; then
  exec "$@"
fi
exec "$@" >"$logs/rank-$rank.log" 2>&1
