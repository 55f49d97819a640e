#!/usr/bin/env bash
# install-torch.sh PYTHON [REQUIREMENT]: the torch that fits this machine, or the one asked for.
# With an NVIDIA driver PyPI's CUDA build; without one the CPU build, which is gigabytes smaller.
set -euo pipefail
python=$1 wanted=${2:-}
version=2.13.0

install() { "$python" -m pip install --quiet "$@"; }

if [[ -n $wanted ]]; then
  install "$wanted"
elif nvidia-smi >/dev/null 2>&1; then
  install "torch===$version" # three =: exactly this build, not $version+cpu
else
  # The CPU build where pip is set up to find one (PIP_INDEX_URL, PIP_FIND_LINKS), else any.
  install "torch==$version+cpu" 2>/dev/null || install "torch==$version"
fi
