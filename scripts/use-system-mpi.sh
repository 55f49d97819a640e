#!/usr/bin/env bash
# use-system-mpi.sh PYTHON MPICC: from now on mpi4py's wheel loads the MPI of this mpicc, in every process of this Python
# that has no MPI4PY_LIBMPI of its own. Fails, and changes nothing, where the wheel cannot load it.
set -euo pipefail
python=$1 mpicc=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo 'int MPI_Init(int *, char ***); int main(void) { return MPI_Init(0, 0); }' >"$scratch/a.c"
"$mpicc" "$scratch/a.c" -o "$scratch/a"
library=$(ldd "$scratch/a" | awk '$1 ~ /^libmpi(ch)?(_[a-z0-9_]+)?\.so/ { print $3; exit }')
[[ -e $library ]] || { echo "use-system-mpi.sh: programs of $mpicc load no libmpi.so" >&2; exit 1; }
version=$(MPI4PY_LIBMPI=$library "$python" -m mpi4py --mpi-lib-version | tr '\0\n' '  ')
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import os; os.environ.setdefault('MPI4PY_LIBMPI', '$library')" >"$packages/system-mpi.pth"
echo "mpi4py loads $library: ${version:0:60}"
