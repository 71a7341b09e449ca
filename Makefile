# `make run` and `make test` may each be the first command on a fresh machine: Python 3.10+ and make are all they need.

PYTHON ?= python3
CONFIG ?= experiments/gpt2/const.yaml
PYTEST_ARGS ?=
TENTH ?= $(shell expr $$(git rev-list --count HEAD) % 10)

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
DEPENDENCIES := setup.cfg pyproject.toml constraints.txt

# A finished install leaves a stamp that names this folder. Without one, the environment is half made, moved or broken
# and is made anew; with one that is older than $(DEPENDENCIES), it is brought up to date in place.
SOUND := [ "$$(cat .venv/.installed 2>/dev/null)" = "$(CURDIR)" ] && $(BIN)/python -c '' 2>/dev/null
UNSOUND := $(shell $(SOUND) || echo unsound)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run test test-all test-tenth lint bench docs format clean unsound

help:  ## show this list
	@echo "usage: make TARGET [PYTHON=python3.12] [CONFIG=$(CONFIG)] [PYTEST_ARGS='-k batch']"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

run: .venv/.installed  ## set up if need be, then train the example CONFIG here, on GPUs if there are any, without a cluster
	$(BIN)/det-ds run $(CONFIG) . --slots auto

test: .venv/.installed-dev  ## set up if need be, then run all tests but the long ones: about five minutes on two cores; PYTEST_ARGS='-n 0' one by one
	$(PYTEST) -m 'not long' $(PYTEST_ARGS)

test-all: .venv/.installed-dev  ## run every test, with many new examples for each property: half an hour or more
	$(PYTEST) --hypothesis-profile=explore $(PYTEST_ARGS)

test-tenth: .venv/.installed-dev  ## run a tenth of the long tests, chosen by the commit (or TENTH=0 to 9)
	$(PYTEST) --long-tenth=$(TENTH) $(PYTEST_ARGS)

lint: .venv/.installed-dev  ## style, format, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.installed-dev  ## print ratios: a step beside plain DeepSpeed's and Determined's loop, a start beside torchrun's
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench

docs: .venv/.installed-dev  ## build the documentation into site/; a broken link or reference is an error
	$(BIN)/mkdocs build --strict

format: .venv/.installed-dev  ## put style and format right where a machine can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove the environment and every cache; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: $(DEPENDENCIES) $(UNSOUND)
	@extras=models stamps=.installed more=; $(INSTALL)

# Compiled once, and not by each of the processes of the tests.
.venv/.installed-dev: $(DEPENDENCIES) $(UNSOUND)
	@extras=models,search,dev stamps='.installed .installed-dev' more=--compile-bytecode; $(INSTALL)

# The stamps go first and come back last, so that an interrupted install is seen as one.
define INSTALL
set -e; start=$$(date +%s); \
if ! { $(SOUND); }; then \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "PYTHON=$(PYTHON) is not Python 3.10 or newer ($$($(PYTHON) --version 2>&1)). Name one: make PYTHON=python3.12" >&2; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "PYTHON=$(PYTHON) cannot make environments. Debian and Ubuntu: apt install python3-venv. Or name another: make PYTHON=..." >&2; exit 1; }; \
	echo "Making .venv with $$($(PYTHON) --version) ..."; \
	rm -rf .venv; $(PYTHON) -m venv .venv; \
fi; \
uv=$$(command -v uv || true); \
if [ -z "$$uv" ]; then \
	echo "Installing uv in .venv ..."; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input uv; \
	uv=$(BIN)/uv; \
fi; \
echo "Installing determined-ds[$$extras] in .venv by uv; most of it is torch ..."; \
rm -f .venv/.installed .venv/.installed-dev; \
DS_BUILD_OPS=0 "$$uv" pip install --python $(BIN)/python -c constraints.txt $$more -e ".[$$extras]"; \
for stamp in $$stamps; do echo "$(CURDIR)" > ".venv/$$stamp"; done; \
echo "Installed in $$(($$(date +%s) - start)) s."
endef
