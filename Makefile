# `make demo` and `make test` do all their own set-up; they need Python 3.11 or newer and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test check format clean

help:  ## Show this list.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml tools/install_torch.py
	@$(PYTHON) -c 'import sys; sys.exit("Draftwing needs Python 3.11 or newer, found " + sys.version.split()[0] + ": set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "setting up $(VENV) (once, a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/install_torch.py
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(READY)

setup: $(READY)  ## Create .venv with everything needed.

demo: $(READY)  ## Decode held-out Python plainly and speculatively: the same text, and the speed of each.
	$(BIN)/draftwing compare --texts

test: $(READY)  ## Run the test suite.
	$(BIN)/python -m pytest

check: $(READY)  ## Lint, format, types, floors, exports, README.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_structure.py tests/test_readme.py

format: $(READY)  ## Format and mend what ruff can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and caches; trained runs in build/ stay.
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
