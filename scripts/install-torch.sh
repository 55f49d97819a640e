#!/usr/bin/env bash
# install-torch.sh PYTHON [REQUIREMENT]: the torch that fits this machine, or the one asked for.
# With an NVIDIA driver PyPI's CUDA build; without one the CPU build, which is gigabytes smaller:
# from where pip is set up to find one (PIP_INDEX_URL, PIP_FIND_LINKS), else from torch's own index,
# else whatever PyPI has.
set -euo pipefail
python=$1 wanted=${2:-}
version=2.13.0

install() { "$python" -m pip install --quiet "$@"; }

if [[ -n $wanted ]]; then
  install "$wanted"
elif nvidia-smi >/dev/null 2>&1; then
  install "torch===$version" # three =: exactly this build, not $version+cpu
else
  cpu=https://download.pytorch.org/whl/cpu
  install "torch==$version+cpu" 2>/dev/null ||
    install "torch==$version+cpu" --extra-index-url "$cpu" --retries 1 --timeout 10 2>/dev/null ||
    install "torch==$version"
fi
