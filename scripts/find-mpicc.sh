#!/usr/bin/env bash
# Prints the mpicc of the machine's own MPI, if there is one: the virtual environment's do not count.
set -euo pipefail
venv=$(realpath -m "${VENV:-.venv}")
IFS=:
for folder in $PATH; do
  case $(realpath -m "$folder") in
    "$venv"/*) continue ;;
  esac
  if [[ -x $folder/mpicc ]]; then
    echo "$folder/mpicc"
    exit
  fi
done
