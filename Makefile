# Two commands for a newcomer: `make serve` and `make test`. Everything they need goes into .venv.
#
#   make serve ARGS="--port 9000"     flags for the server
#   make test PYTHON=python3.11       another interpreter (3.10 or newer)
#   make serve TORCH=torch==2.11.0    another torch (a GPU and a CPU build both serve)
#   make test PYTEST_FLAGS="-n 0 -k radix"     some tests, in one process
#   make dist BUILD_FLAGS=--no-isolation       with the setuptools of .venv, without the network

VENV ?= .venv
TORCH ?= torch==2.13.0
# For torch builds that bring no Triton of their own (the CPU wheels); the others pin the one they need.
TRITON ?= triton==3.6.0
PIP_FLAGS ?=
PYTEST_FLAGS ?=
BUILD_FLAGS ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS)

# The first interpreter that is new enough and can make virtual environments.
PYTHON ?= $(shell for python in python3.12 python3.11 python3.10 python3.13 python3 python; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 \
	&& echo "$$python" && break; done)

FIND_TRITON = import sys; from importlib.metadata import requires; \
	sys.exit(any(name.startswith("triton") for name in requires("torch") or []))
COUNT_TESTS = import sys, xml.etree.ElementTree as tree; \
	suite = tree.parse(sys.argv[1]).getroot().find("testsuite").attrib; \
	ran = int(suite["tests"]) - int(suite["skipped"]); \
	print(ran, "tests ran"); sys.exit(ran < 1)

.DEFAULT_GOAL := help
.PHONY: help serve test test-browser test-ray lint format dist clean distclean

help:  ## Show what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(VENV)/.installed  ## Install what is missing, fetch the default model once, start the server
	$(BIN)/minisgl serve $(ARGS)

test: $(VENV)/.installed-dev  ## Lint, then run every test (fails when none ran)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/minisgl pull smollm2-135m
	$(BIN)/python -m pytest -q -n auto --dist worksteal --junitxml=$(VENV)/test-report.xml $(PYTEST_FLAGS)
	@$(BIN)/python -c '$(COUNT_TESTS)' $(VENV)/test-report.xml

test-browser: $(VENV)/.installed-dev | $(BIN)/python  ## Drive the page in Chromium, and take its pictures for the docs
	@command -v chromium chromium-browser google-chrome >/dev/null || { apt-get update && apt-get install -y chromium; } \
		|| { echo "this needs Chromium; install your system's package and run it again"; exit 1; }
	$(PIP) -e ".[dev,browser]"
	$(BIN)/minisgl pull smollm2-135m
	$(BIN)/python -m pytest -q --junitxml=$(VENV)/browser-report.xml tests/browser --pictures docs/images $(PYTEST_FLAGS)
	@$(BIN)/python -c '$(COUNT_TESTS)' $(VENV)/browser-report.xml

test-ray: $(VENV)/.installed-dev | $(BIN)/python  ## Serve on a real Ray on this machine: a kill, an upgrade, scaling
	$(PIP) -e ".[dev,ray]"
	$(BIN)/minisgl pull smollm2-135m
	$(BIN)/python -m pytest -q -rA -n 0 --junitxml=$(VENV)/ray-report.xml tests/ray --ray $(PYTEST_FLAGS)
	@$(BIN)/python -c '$(COUNT_TESTS)' $(VENV)/ray-report.xml

lint: $(VENV)/.installed-dev  ## Lint, formatting and types, nothing else
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed-dev  ## Let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The wheel is built from the source archive, so both are complete. This needs no torch.
dist: | $(BIN)/python  ## Build the wheel and the source archive into dist/
	rm -rf build dist
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	@$(BIN)/python -c 'import build' 2>/dev/null || $(PIP) "build>=1.2"
	$(BIN)/python -m build --outdir dist $(BUILD_FLAGS) .

clean:  ## Remove what builds and tests leave behind (the virtual environment stays)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis $(VENV)/test-report.xml
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## The virtual environment too (models in the user's cache stay)
	rm -rf $(VENV)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "minisgl needs Python 3.10 or newer with the venv module" \
		"(Debian, Ubuntu: apt install python3-venv), or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# torch goes first and pinned, so that no later package chooses another one.
$(VENV)/.installed-torch: Makefile | $(BIN)/python
	@echo "installing $(TORCH) into $(VENV) (the first time this takes minutes)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) "$(TORCH)"
	@if [ "$$(uname -s)" = Linux ] && $(BIN)/python -c '$(FIND_TRITON)'; then \
		echo "$(PIP) $(TRITON)"; $(PIP) "$(TRITON)"; fi
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.installed-torch
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed-torch
	$(PIP) -e ".[dev]"
	@touch $@ $(VENV)/.installed
