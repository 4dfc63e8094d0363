# octavo's chores. `make demo` and `make test` are the ones to know; both make .venv first if it is missing.
#
#   make venv      .venv with the versions of requirements.lock, and octavo itself from this checkout
#   make demo      train a small language model in FP32, BF16 and FP8 and compare the three
#   make test      format, lint, types, tests but the long ones
#   make test-all  the same with every test
#   make docs      the documentation as a site in build/site; a broken link is an error
#   make fmt       let ruff format the code and fix what it can
#   make clean     remove .venv, caches and build leftovers (runs/ stays)
#
# PYTHON chooses the interpreter that .venv is made from: make venv PYTHON=python3.12

PYTHON ?= python3
STAMP := .venv/.installed

.DEFAULT_GOAL := venv
.PHONY: venv demo test test-all docs fmt clean

venv: $(STAMP)

# The stamp is written last, so an interrupted installation is taken up again by the next call.
$(STAMP): requirements.lock pyproject.toml scripts/venv.sh CMakeLists.txt $(wildcard src/octavo/kernels/native/*)
	@PYTHON="$(PYTHON)" scripts/venv.sh
	@touch $@

demo: $(STAMP)
	@.venv/bin/octavo demo

test: $(STAMP)
	@scripts/check.sh -m "not long"
	@echo "the tests marked long: make test-all"

test-all: $(STAMP)
	@scripts/check.sh

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build
	@echo "docs: build/site/index.html"

fmt: $(STAMP)
	@.venv/bin/ruff check --fix-only --quiet .
	@.venv/bin/ruff format .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
