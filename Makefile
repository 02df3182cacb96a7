# Every target sets up what it needs in .venv; `make help` lists them. PYTHON=python3.12 and CXX=g++-13 choose others.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-full bench format check-format gpu-check clean distclean

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(shell cat constraints.txt pyproject.toml tools/setup.sh tools/requirements.py | cksum | cut -d' ' -f1)
export PATH := $(CURDIR)/$(BIN):$(PATH)

help:
	@echo "make demo        generate with SmolLM2-135M and the shipped EAGLE-3 head, and compare with plain decoding"
	@echo "make test        build, then the tests (minutes)"
	@echo "make test-full   build, then the larger sweeps only"
	@echo "make bench       build, then the benchmarks, into benchmarks/results/"
	@echo "make build       set up .venv and build the native module in place"
	@echo "make format      clang-format and ruff over everything (check-format: only look)"
	@echo "make gpu-check   state of the CUDA backend on this machine"
	@echo "make clean       remove build products (distclean: .venv and .cache too)"

# The stamp's name carries a checksum of what it depends on, so a checkout of an older state sets up again.
$(READY):
	@bash tools/setup.sh $(VENV)
	@rm -f $(VENV)/.ready-* && touch $@

setup: $(READY)

$(VENV)/.installed: $(READY) setup.py pyproject.toml
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

build: $(VENV)/.installed
	@$(BIN)/python setup.py --quiet build_ext --inplace

demo: build
	@$(BIN)/eagle-cuda demo

test: build
	@$(BIN)/python -m pytest -q -m "not full" $(ARGS)

test-full: build
	@$(BIN)/python -m pytest -q -m full $(ARGS)

bench: build
	@for bench in benchmarks/bench_*.py benchmarks/end_to_end.py; do echo "== $$bench"; $(BIN)/python $$bench; done

format: $(READY)
	@$(BIN)/python tools/format.py

check-format: $(READY)
	@$(BIN)/python tools/format.py --check

gpu-check: build
	@$(BIN)/python tools/gpu_check.py

clean:
	@rm -rf build dist *.egg-info eagle_cuda/_C*.so $(VENV)/.installed
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV) .cache
