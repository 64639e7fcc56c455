# make test | test-all | demo | bench | lint | format | gpu-check
#
# Uses the active virtual environment and the torch it has. Without one, makes .venv with the newest torch, or with
#     make test TORCH=torch==2.13.0 VENV=.venv-cpu
# and makes it anew when it is no longer what it should be. A conda environment: make test VIRTUAL_ENV=$CONDA_PREFIX

SHELL := bash

PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
PYTEST_ARGS ?=
DEVICE ?= cpu
MACHINE ?= $(DEVICE)-$(shell uname -n)
RESULTS := benchmarks/results

ENVIRONMENT := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),$(abspath $(VENV)))
RUN := $(ENVIRONMENT)/bin/python
INSTALL := VIRTUAL_ENV="$(VIRTUAL_ENV)" .ci/environment "$(ENVIRONMENT)" "$(PYTHON)" "$(TORCH)"
# A process for each core, and no more than four, for each holds up to 3 GiB. The tests of a file stay in one process, so
# that nothing they share is made twice; files in the order of their names, in which the longest are not the last. Every
# process has as many of torch's threads as there are cores: those that wait must not take the cores from those that work.
PROCESSES := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PYTEST := OMP_WAIT_POLICY=passive $(RUN) -m pytest -q $(PROCESSES)
CXX_FILES = $(shell git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

.PHONY: test test-all demo bench lint format gpu-check

test:
	@$(INSTALL) test
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all:
	@$(INSTALL) test
	$(PYTEST) $(PYTEST_ARGS)

demo:
	@$(INSTALL) ""
	@$(RUN) -m overflowstat demo

# Everything on this machine, and its tables in the README. Threads stay on their cores. Some 25 minutes on two of them.
bench:
	@$(INSTALL) bench
	OMP_PROC_BIND=close $(RUN) benchmarks/kernel.py --device $(DEVICE) --json $(RESULTS)/kernel-$(MACHINE).json
	OMP_PROC_BIND=close $(RUN) benchmarks/overhead.py --device $(DEVICE) --json $(RESULTS)/overhead-$(MACHINE).json \
	    --plot $(RESULTS)/overhead-$(MACHINE).png
	$(RUN) benchmarks/tables.py $(RESULTS)/kernel-$(MACHINE).json $(RESULTS)/overhead-$(MACHINE).json

lint:
	@$(INSTALL) test,dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(ENVIRONMENT)/bin/clang-format --dry-run --Werror $(CXX_FILES)

format:
	@$(INSTALL) test,dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(ENVIRONMENT)/bin/clang-format -i $(CXX_FILES)

# With the Python that is there, and no network.
gpu-check:
	$(PYTHON) .ci/gpu-check
