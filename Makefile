# The one door. Needs Python 3.11 or newer, make and git; everything else goes into .venv.
#   make lab       the incident's notebooks, headless, into reports/        make jupyter   the same in JupyterLab
#   make test      lint, types, tests, notebooks                            make bench     speeds beside named rivals
#   make e2e       against a real SGLang on the CPU                         make conformance RELEASE=0.5.23
#   make docs      docs/api.md from the docstrings
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && exit; done; \
    command -v python3 || command -v python)
BIN := .venv/bin
LAB := $(BIN)/python -m hicache_lab
# all offline: 06 and 07 show recorded runs until they are given a server or a grid
LAB_NOTEBOOKS := $(sort $(wildcard notebooks/[0-9][0-9]_*.ipynb))
PYTEST_ARGS ?=

.PHONY: help lab test lint types jupyter bench e2e conformance docs constraints clean venv venv-dev
help:
	@sed -n 's/^#   //p' Makefile

venv:
	@$(if $(PYTHON),,$(error no Python found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12))
	@$(PYTHON) scripts/bootstrap.py lab

venv-dev:
	@$(if $(PYTHON),,$(error no Python found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12))
	@$(PYTHON) scripts/bootstrap.py dev

lab: venv
	@$(LAB) run $(LAB_NOTEBOOKS) --output reports

jupyter: venv
	@$(BIN)/jupyter lab --ip=127.0.0.1 --notebook-dir=.

lint: venv-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: venv-dev
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -m "not server and not stress" $(PYTEST_ARGS)

bench: venv-dev
	@set -e; for bench in bench/bench_*.py; do echo "== $$bench"; $(BIN)/python $$bench; done

e2e: venv-dev
	$(BIN)/python -m pytest -m "server or stress" $(PYTEST_ARGS)

conformance: venv-dev
	@$(if $(RELEASE),,$(error name the release: make conformance RELEASE=0.5.23))
	@$(BIN)/python conformance/run.py --release $(RELEASE)

docs: venv-dev
	@$(BIN)/python scripts/api_docs.py

constraints: venv-dev
	@$(BIN)/python scripts/pin.py

clean:
	rm -rf .venv reports .pytest_cache .mypy_cache .ruff_cache .hypothesis
