# `make train` and `make test` are all a fresh machine needs: Python >= 3.12 and make.
PYTHON ?= python3
VENV ?= .venv
# Another version of jax (JAX=0.11.2), other extras of pyproject.toml (EXTRAS=dev,cuda).
JAX ?=
EXTRAS ?= dev
# What installs into it: pip, or something faster (.ci/run has uv).
INSTALL ?= $(BIN)/python -m pip install --quiet
# Processes of pytest: one more than there are cores, as some tests wait for runs that they start.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() + 1))')
CONFIG ?= configs/debug.py
WORKDIR ?= runs/debug
ARGS ?=

# Large arrays in huge pages, where malloc is glibc's: a CPU's steps take an eighth to a third less
# time (docs/reference/performance.md).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(or $(strip $(JAX)),newest)-$(EXTRAS)
PIN := $(if $(strip $(JAX)),jax==$(strip $(JAX)) jaxlib==$(strip $(JAX)))

.PHONY: train test quick lint format bench notebooks clean

train: $(STAMP)
	$(BIN)/python -m ats_jax train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Files that compile nothing and start no process: what to run at each edit.
quick: $(STAMP)
	$(BIN)/python -m pytest --quick -n 2 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m ats_jax bench --config=$(CONFIG) $(ARGS)

notebooks: $(STAMP)
	$(BIN)/jupytext --quiet --to ipynb --update notebooks/*.py

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 12) else \
	  f"ats_jax needs Python >= 3.12; $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) --editable '.[$(EXTRAS)]' $(PIN)
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
