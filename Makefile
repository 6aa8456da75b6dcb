# Everything installs itself: `make demo` and `make test` work on a fresh clone.
# Needs Python >= 3.11 (PYTHON=... to name one) and make. Variables are explained in CONTRIBUTING.md.

PYTHON      ?= python3
OUT         ?= runs
# Which build of torch: empty (look at this machine), cpu, or cuda. Or the address of an index that holds a build.
TORCH       ?=
TORCH_INDEX ?=
# Two workers: what the suite is timed for. PYTEST_ARGS="-k gram" passes anything else on.
WORKERS     ?= 2
PYTEST_ARGS ?=

BIN     := .venv/bin
STAMP   := .venv/.installed
PIP     := $(BIN)/python -m pip --disable-pip-version-check
PYTEST  := $(BIN)/python -m pytest
TORCH_PIN := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help install demo demo-quick test check format lint types build import-time bench gpu clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---------------------------------------------------------------- installation

install: $(STAMP)  ## make .venv and install kernrl with its development tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kernrl needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1). Pass PYTHON=python3.12, say."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip -q
	@echo "Installing into .venv (some minutes the first time) ..."
	@$(MAKE) --no-print-directory .torch
	@$(PIP) install -qq -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

# On Linux the default wheel of torch is a CUDA build that brings gigabytes of libraries. Without an NVIDIA GPU
# a CPU build is taken instead: first from whatever pip is configured with, then by uv, which knows where the
# project's own CPU builds are. If neither has one, this stops and says so, rather than download the rest.
.PHONY: .torch
.torch:
	@if $(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != "$(TORCH_PIN)"[7:])' 2>/dev/null; then \
	  exit 0; \
	elif [ -n "$(TORCH_INDEX)" ]; then \
	  $(PIP) install -qq --no-deps --index-url "$(TORCH_INDEX)" "$(TORCH_PIN)"; \
	elif [ "$(TORCH)" = cuda ] || [ "$$(uname -s)" != Linux ] || { [ "$(TORCH)" != cpu ] && nvidia-smi -L >/dev/null 2>&1; }; then \
	  $(PIP) install -qq -c constraints.txt "$(TORCH_PIN)"; \
	elif $(PIP) install -qq --no-deps "$(TORCH_PIN)+cpu" 2>/dev/null; then \
	  exit 0; \
	elif $(PIP) install -qq -c constraints.txt uv && \
	     $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --torch-backend=cpu "$(TORCH_PIN)"; then \
	  exit 0; \
	else \
	  echo "kernrl: no CPU build of $(TORCH_PIN) could be reached, and this machine has no NVIDIA GPU." >&2; \
	  echo "Pass TORCH_INDEX=<address of a package index with CPU builds>, or TORCH=cuda to take the CUDA build (gigabytes)." >&2; \
	  exit 1; \
	fi

# ---------------------------------------------------------------- use

demo: $(STAMP)  ## train kernel and deep agents on two tasks, write one report
	@$(BIN)/kernrl run experiments/quickstart.toml --out $(OUT)

demo-quick: $(STAMP)  ## the same, cut down to see that it runs (numbers mean nothing)
	@$(BIN)/kernrl run experiments/quickstart.toml --quick --out $(OUT)/quick

test: $(STAMP)  ## all tests but the groups named in the header (slow, peers, gpu, browser)
	@$(PYTEST) -n $(WORKERS) $(PYTEST_ARGS)

bench: $(STAMP)  ## time kernrl and its peers side by side
	@$(BIN)/python -m benchmarks

gpu: $(STAMP)  ## the tests that need a CUDA device
	@nvidia-smi -L 2>/dev/null || \
	  { echo "make gpu: no NVIDIA GPU on this machine (nvidia-smi found none). Everything else runs without: make test."; exit 1; }
	@$(PYTEST) -m gpu $(PYTEST_ARGS)

# ---------------------------------------------------------------- what CI runs, cheapest first

check: format lint types import-time build test  ## format, lint, types, import time, package build, tests

format: $(STAMP)
	@$(BIN)/ruff format --check .

lint: $(STAMP)
	@$(BIN)/ruff check .

types: $(STAMP)
	@$(BIN)/mypy

import-time: $(STAMP)
	@$(PYTEST) -q tests/test_house.py -k light

# Without isolation: hatchling is in .venv already, so nothing is downloaded.
build: $(STAMP)
	@rm -rf dist && $(BIN)/python -m build --no-isolation >/dev/null && ls dist

clean:  ## remove .venv, caches and builds (runs/ stays)
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
