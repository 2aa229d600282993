# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup install demo demo-federation test test-slow test-chaos test-all lint bench clean

setup: $(VENV)/.stamp install  ## make .venv with everything that the tests and the demo need

$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=77" wheel
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' --config-settings editable_mode=strict
	touch $@

# A strict editable install links file by file, so a new file needs this again (a second or two, no network).
install: $(VENV)/.stamp
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . --config-settings editable_mode=strict

demo: setup  ## 200 clients, attackers among them, three runs side by side
	$(BIN)/coterie demo

demo-federation: setup  ## a server and four hospitals on loopback, with TLS
	$(BIN)/coterie demo-federation

test: setup  ## everything but the slow tests and the chaos
	$(BIN)/python -m pytest -m "not slow and not chaos" -n 2

test-slow: setup  ## the slow tests: full-size runs, the demo, the wheel in an environment of its own
	$(BIN)/python -m pytest -m slow

test-chaos: setup  ## a federation whose processes are killed and whose connections are cut
	$(BIN)/python -m pytest -m chaos

test-all: test test-slow test-chaos  ## every test

lint: setup  ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

bench: setup  ## ratios against the tight loop and against plain Flower, measured side by side
	$(BIN)/python benchmarks/simulation.py
	$(BIN)/python benchmarks/federation.py

clean:
	rm -rf $(VENV) build dist *.egg-info
