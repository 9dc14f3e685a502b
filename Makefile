# Every target installs what it needs into $(VENV) first; nothing has to be set up by hand.
#
#   make demo    train a small model on real pictures, speech and text, then show its answers (ARGS="--minutes 30" trains longer)
#   make test    the tests that CI runs
#   make help    the other targets

PYTHON ?= python3
VENV ?= .venv
PYTEST_WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FOLDERS := ernie_multi protocol kernels corpora tokenizers backbone services
PACKAGES := $(wildcard $(addsuffix /*/__init__.py,$(FOLDERS)) $(addsuffix /*/*/__init__.py,$(FOLDERS)))
SOURCES := $(FOLDERS) $(wildcard tests benchmarks docs) setup.py
# Two test processes on two cores leave one thread to each; the variables reach the services they start.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full lint format bench clean distclean

help:
	@echo "make setup      create $(VENV) and install the project with the versions of constraints.txt"
	@echo "make demo       train a small model from scratch and show what it answers; options by ARGS=\"…\""
	@echo "make test       the tests that CI runs"
	@echo "make test-full  also the slow, browser and GPU tests (each skips with a reason where it can't run)"
	@echo "make lint       ruff, mypy and the rules on imports between layers"
	@echo "make format     let ruff rewrite the sources"
	@echo "make bench      the benchmarks"
	@echo "make clean      remove caches and build output; make distclean also $(VENV) and runs/"

setup: $(STAMP)

# A new sub-package reaches the editable install only by installing again, so their list is a prerequisite.
$(STAMP): pyproject.toml setup.py constraints.txt $(PACKAGES)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; " + sys.executable + " is " + sys.version.split()[0] + ". Say which to use: make PYTHON=python3.12 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/ernie-multi demo $(ARGS)

test: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile -m "not slow and not browser and not gpu" $(ARGS)

test-full: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:xdist tests/packaging/test_layers.py

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@for script in benchmarks/[!_]*.py; do \
		test -e "$$script" || { echo "benchmarks/ holds no script"; break; }; \
		echo "== $$script"; $(BIN)/python "$$script" $(ARGS) || exit 1; \
	done

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(FOLDERS) tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) runs
