# `make train` and `make test` do everything from a fresh clone: virtual environment, installation, run.
# Nothing is reinstalled until pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
# train: extras to install (EXTRAS=cuda13), the experiment, and arguments handed on to the trainer.
EXTRAS ?=
CONFIG ?= experiments/gpt_32k.py
ARGS ?=
# test, pytest: the tests to run, which of them by their markers, in how many processes, and arguments for pytest.
TESTS ?= tests
MARKS ?= not full
JOBS ?= 2
PYTEST_ARGS ?=
# What pytest's reports in the virtual environment's folder are called.
REPORT ?= tests
# test: the time that it may take, installation included, on two idle cores.
MINUTES ?= 14
# Non-empty: install the lowest versions that pyproject.toml allows.
LOWEST ?=

BIN := $(VENV)/bin
# Two quiets leave the errors.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
RUN_STAMP := $(VENV)/.installed-for-run$(addprefix -,$(EXTRAS))
DEV_STAMP := $(VENV)/.installed-for-dev
BEGUN := $(shell date +%s)

.PHONY: help train test test-full pytest test-lowest lint typecheck format clean distclean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(RUN_STAMP) ## train a GPT at 32k context (EXTRAS=cuda13, CONFIG=FILE, ARGS="--num-steps 100")
	$(BIN)/python -m trainer --config $(CONFIG) $(ARGS)

# Both groups always run, so that one report holds every failure; the larger one is last, and so is its summary.
# pytest's status 5 means that TESTS and MARKS left a group empty.
define run_tests
@status=0; \
$(BIN)/python -m pytest -m "serial and ($(MARKS))" --junitxml=$(VENV)/$(REPORT)-serial.xml $(TESTS) $(PYTEST_ARGS) || { code=$$?; [ $$code -eq 5 ] || status=$$code; }; \
$(BIN)/python -m pytest -m "not serial and ($(MARKS))" -n $(JOBS) --junitxml=$(VENV)/$(REPORT)-parallel.xml $(TESTS) $(PYTEST_ARGS) || { code=$$?; [ $$code -eq 5 ] || status=$$code; }; \
exit $$status
endef

test: lint typecheck ## what every change must pass: lint, types and the tests, in 14 minutes (MINUTES=60)
	$(run_tests)
	@$(BIN)/python .ci/within.py $(MINUTES) $(BEGUN) "make test MINUTES=60 allows more" $(VENV)/$(REPORT)-serial.xml $(VENV)/$(REPORT)-parallel.xml

test-full: MARKS := not gpu
test-full: lint typecheck ## all tests that this machine can run, on its newest Python, too
	$(run_tests)
	@newer=$$(.ci/newer_python) && if [ -n "$$newer" ]; then \
	  $(MAKE) --no-print-directory pytest VENV=.venv-newest PYTHON="$$newer" MARKS="not gpu"; fi

pytest: $(DEV_STAMP) ## the tests alone (TESTS=tests/kernels, MARKS=full)
	$(run_tests)

test-lowest: ## the tests on the lowest versions that pyproject.toml allows
	@$(MAKE) --no-print-directory pytest VENV=.venv-lowest LOWEST=1

lint: $(DEV_STAMP) ## style, formatting and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

typecheck: $(DEV_STAMP) ## mypy over the four packages
	$(BIN)/mypy

format: $(DEV_STAMP) ## format the code and apply the linter's safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove caches and build output; runs/ and the environments stay
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find kernels layers trainer experiments tests -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## clean, and remove the virtual environments
	rm -rf .venv .venv-*

# A stamp is written only after its installation has succeeded, so an interrupted one starts over.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "flax-longcontext needs Python 3.11 or newer; '$(PYTHON) --version' says: $$($(PYTHON) --version 2>&1 | head -n 1). Choose another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot create virtual environments; on Debian and Ubuntu, run: apt-get install python3-venv" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(RUN_STAMP): pyproject.toml $(VENV)/.created
	@echo "Installing flax-longcontext$(if $(EXTRAS),[$(EXTRAS)]) and its dependencies into $(VENV) (a minute or more the first time)"
	@$(PIP) --editable ".$(if $(EXTRAS),[$(EXTRAS)])"
	@touch $@

$(DEV_STAMP): pyproject.toml $(VENV)/.created
	@echo "Installing flax-longcontext[dev] and its dependencies into $(VENV) (a minute or more the first time)"
	@$(if $(LOWEST),$(BIN)/python .ci/lowest_versions.py > $(VENV)/lowest.txt)
	@$(PIP) $(if $(LOWEST),--constraint $(VENV)/lowest.txt) --editable ".[dev]"
	@touch $@
