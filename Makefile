# `make run`: the main job.  `make test`: all tests.  Both set up what they need in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CORES ?= 2

.PHONY: run test test-long lint format docs setup lock test-sglang test-peers clean

run: setup
	PATH="$(abspath $(BIN)):$$PATH" snakemake --cores $(CORES)
	$(BIN)/python scripts/summary.py --run-dir results/demo

test: setup lint
	$(BIN)/python -m pytest tests -m "not long"

test-long: setup
	$(BIN)/python -m pytest tests/workflow -m long

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" snakefmt -l 120 --check Snakefile rules
	PATH="$(abspath $(BIN)):$$PATH" snakemake --lint

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	PATH="$(abspath $(BIN)):$$PATH" snakefmt -l 120 Snakefile rules

docs: setup
	$(BIN)/python scripts/config_docs.py --write

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "eaglet needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

lock: # after an edit of requirements.in
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.in
	$(BIN)/python -m pip freeze | sed 's/+cpu$$//' > requirements.txt
	touch $(VENV)/.installed

test-sglang: setup
	tests/sglang/install.sh .venv-sglang
	EAGLET_SGLANG_PYTHON="$(abspath .venv-sglang/bin/python)" $(BIN)/python -m pytest tests/sglang

test-peers: setup
	tests/peers/install.sh .venv-peers
	EAGLET_PEERS_PYTHON="$(abspath .venv-peers/bin/python)" $(BIN)/python -m pytest tests/peers

clean:
	rm -rf .snakemake .pytest_cache .ruff_cache
