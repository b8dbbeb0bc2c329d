# `make demo` and `make test` do their own set-up; they need Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# uv installs packages in a fraction of pip's time, but does not read pip's settings: if it fails, pip is used.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help setup demo test test-all test-oldest test-newest check docs format wheels clean

help:  ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 11

$(READY): pyproject.toml tools/install_torch.py
	@$(PYTHON) -c 'import sys; sys.exit("Draftwing needs Python 3.11 or newer, found " + sys.version.split()[0] + ": set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "setting up $(VENV) (once, a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/install_torch.py
	@{ $(PIP) uv && $(BIN)/python -m uv pip install --quiet --python $(BIN)/python --editable '.[dev]'; } || $(PIP) --editable '.[dev]'
	@touch $(READY)

setup: $(READY)  ## Create .venv with everything needed.

demo: $(READY)  ## A chat model answers three questions with and without drafts: the same text, and the speed of each.
	$(BIN)/draftwing demo --quantize int8

# One worker per processor. Each runs tests in order, so that those of a file share fixtures; one that has no more
# takes half of what another has left.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

test: $(READY)  ## Run the test suite, some minutes on two cores.
	$(PYTEST)

test-all: $(READY)  ## Run everything: full products, other instruction sets, mutants, oldest and newest packages.
	$(PYTEST) -m ''
	$(BIN)/python tools/mutants.py
	$(MAKE) test-oldest test-newest

# The lower bounds of pyproject.toml, and the newest releases. Old packages have no wheels for new versions of Python. If
# PyTorch's index of CPU builds cannot be reached, both take gigabytes with CUDA.
VERSIONS_oldest := --resolution lowest-direct
VERSIONS_newest := --upgrade
PYTHON_oldest := 3.11
PYTHON_newest := $(BIN)/python
UV := $(BIN)/python -m uv

test-oldest test-newest: test-%: $(READY)
	$(UV) venv --quiet --clear --python $(PYTHON_$*) .venv-$*
	install="$(UV) pip install --quiet --python .venv-$* $(VERSIONS_$*) --editable .[dev]"; \
	$$install --torch-backend auto || $$install
	.venv-$*/bin/python -m pytest -n auto --dist worksteal

check: $(READY) docs  ## Lint, types, import layers, prose, exports, README and docs.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_structure.py tests/test_prose.py tests/test_readme.py

docs: $(READY)  ## Build the documentation site in build/site; half a minute.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)  ## Format, and fix what ruff can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without a platform: the kernel is compiled on first use.
WHEELS := "" manylinux_2_28_x86_64 manylinux_2_28_aarch64 macosx_12_0_arm64

wheels: $(READY)  ## Build wheels with compiled kernels, and the source distribution, in dist/; some minutes.
	$(BIN)/python -m hatchling build -t sdist -d dist
	set -e; for platform in $(WHEELS); do DRAFTWING_WHEEL=$$platform $(BIN)/python -m pip wheel --no-deps --wheel-dir dist .; done

clean:  ## Remove the environment and caches; trained runs in build/ stay.
	rm -rf $(VENV) .venv-oldest .venv-newest .pytest_cache .ruff_cache .mypy_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
