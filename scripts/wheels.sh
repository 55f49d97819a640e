#!/usr/bin/env bash
# wheels.sh PYTHON TOOLS: dist/*.whl for each Python that is found, and the source they are made from.
# They run where glibc is 2.28 or newer: RHEL 8, Debian 10, Ubuntu 20.04. PYTHON only packs the source;
# TOOLS is a virtual environment with what the extra `wheels` names.
#
# PYTHONS="python3.10 /opt/python3.13/bin/python"   these Pythons, not those that are found
# HPC_OLDSGD_CUDA=1   with the GPU kernel. nvcc takes no libc++, so the machine's own compiler builds it,
#                     and the wheels need a glibc that is about as new as this machine's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 tools=$2
made=$PWD/build/wheels
rm -rf "$made" dist/hpc_oldsgd-* && mkdir -p "$made" dist

found() { # one interpreter for each version, those of PATH first
  local minor candidate
  for minor in 10 11 12 13 14; do
    for candidate in "python3.$minor" ~/.pyenv/versions/3."$minor".*/bin/python; do
      if "$candidate" -c "import sys; sys.exit(sys.version_info[:2] != (3, $minor))" 2>/dev/null; then
        echo "$candidate"
        break
      fi
    done
  done
}

export HPC_OLDSGD_REQUIRE_NATIVE=1 HPC_OLDSGD_CUDA=${HPC_OLDSGD_CUDA:-0}
if [[ $HPC_OLDSGD_CUDA == 1 ]]; then
  export LDFLAGS='-static-libstdc++ -static-libgcc'
  platform=auto
else
  # Clang with headers and stubs of any glibc, and a libc++ that is linked statically.
  printf '#!/bin/sh\nexec "%s" c++ -target %s-linux-gnu.2.28 "$@"\n' \
    "$tools/bin/python-zig" "$(uname -m)" >"$made/c++"
  chmod +x "$made/c++"
  export CXX=$made/c++
  LDFLAGS=$(cc -print-libgcc-file-name) # which instruction sets the CPU has; zig has no code for that
  export LDFLAGS
  platform=manylinux_2_28_$(uname -m)
fi

"$python" setup.py --quiet sdist --dist-dir dist
source=$(echo dist/hpc_oldsgd-*.tar.gz)
read -ra pythons <<<"${PYTHONS:-$(found | tr '\n' ' ')}"
for python in "${pythons[@]}"; do
  tag=$("$python" -c 'import sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}")')
  echo "$source for $("$python" --version)"
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$made/$tag" "$source"
  # Fails if the extension asks for more than the platform has.
  PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --plat "$platform" --wheel-dir dist "$made/$tag"/*.whl
  "$python" -m zipfile -e dist/hpc_oldsgd-*-"$tag-$tag"-*.whl "$made/$tag"
  (cd "$made/$tag/hpc_oldsgd" && "$python" -c 'import _native; print(_native.build_info())') # without torch
done
ls -l dist
