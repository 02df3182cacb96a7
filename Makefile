# Every target sets up what it needs in .venv; `make help` lists them. PYTHON=python3.12 and CXX=g++-13 choose others.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build simt demo test test-full test-simt test-exact bench format check-format gpu-check gpu-bench clean distclean

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(shell cat constraints.txt pyproject.toml tools/setup.sh tools/requirements.py | cksum | cut -d' ' -f1)
export PATH := $(CURDIR)/$(BIN):$(PATH)

help:
	@echo "make demo        generate with SmolLM2-135M and the shipped EAGLE-3 head, and compare with plain decoding"
	@echo "make test        build, then the tests, and those of the CUDA kernels under the emulator too (minutes)"
	@echo "make test-full   build, then the larger sweeps only, and the emulator's under more schedules"
	@echo "make test-simt   build, then the tests of the CUDA kernels under the emulator only"
	@echo "make test-exact  build, then a million tokens of random configurations, plainly and speculatively (resumes)"
	@echo "make bench       build, then the benchmarks, into benchmarks/results/"
	@echo "make build       set up .venv and build the native module in place"
	@echo "make simt        build the modules whose CUDA kernels run under the emulator (tests/simt)"
	@echo "make format      clang-format and ruff over everything (check-format: only look)"
	@echo "make gpu-check   whether the CUDA kernels do on this machine's GPU what they do under the emulator"
	@echo "make gpu-bench   the benchmarks that have a GPU part, on this machine's GPU"
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

# In the folder of `make build`, so that everything but the kernels is compiled once.
BUILD = build/$(shell $(BIN)/python -c "import sys, sysconfig; print(sys.implementation.cache_tag + '-' + sysconfig.get_platform())")

simt: build
	@$(BIN)/cmake -S . -B $(BUILD) -DEAGLE_SIMT=ON --log-level=NOTICE >/dev/null
	@$(BIN)/cmake --build $(BUILD) --target simt_fast simt_checked selftest_fast selftest_checked ptx_conformance

demo: build
	@$(BIN)/eagle-cuda demo

PASSES = $(BIN)/python tools/test_passes.py

# The emulator checks every access of what its checked build can do in time; the rest is the fast build's.
USUAL := not full
SEED := 1
USUAL_EMULATED := "checked:$(SEED)=$(USUAL)" "fast=$(USUAL) and unchecked"

test: build simt
	@$(PASSES) $(USUAL_EMULATED) "cpu=$(USUAL)" -- $(ARGS)

# The larger sweeps; the usual tests of the emulator under one more schedule (others: `make test-simt SEED=3:200`).
test-full: build simt
	@$(PASSES) cpu=full "checked:2:50=$(USUAL)" "fast=full and unchecked" checked:1:20=full -- $(ARGS)

test-simt: build simt
	@$(PASSES) $(USUAL_EMULATED) -- $(ARGS)

# One thread a process: the models are tiny.
test-exact: build
	@EAGLE_NUM_THREADS=1 $(BIN)/python tests/exactness.py --jobs $$(nproc) --json $(RESULTS)/exactness.json $(ARGS)

# README's figures are over the prompts of PROMPTS=question.jsonl; without it end_to_end.py has its own.
RESULTS = benchmarks/results
END_TO_END = $(if $(PROMPTS),--prompts $(PROMPTS) --json $(RESULTS)/end_to_end.json,$\
  --json $(RESULTS)/end_to_end_own_prompts.json)

bench: build
	@for bench in benchmarks/bench_*.py; do \
	  echo "== $$bench"; name=$$(basename $$bench .py); \
	  $(BIN)/python $$bench --json $(RESULTS)/$${name#bench_}.json; \
	done
	@echo "== benchmarks/end_to_end.py"; $(BIN)/python benchmarks/end_to_end.py $(END_TO_END)

format: $(READY)
	@$(BIN)/python tools/format.py

check-format: $(READY)
	@$(BIN)/python tools/format.py --check

# Where a GPU is there may be no network to set up .venv: any python that has torch will do, and it builds for itself.
GPU_RUN = "$${GPU_PYTHON:-$$(command -v python || command -v python3)}"

gpu-check:
	@$(GPU_RUN) tools/gpu_check.py $(ARGS)

gpu-bench:
	@$(GPU_RUN) tools/gpu_bench.py $(ARGS)

clean:
	@rm -rf build dist *.egg-info eagle_cuda/_C*.so $(VENV)/.installed
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV) .cache
