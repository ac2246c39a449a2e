# Two commands do everything on a fresh machine: `make demo` and `make test`.
# The environment .venv is made once. Where $(PYTHON) already has every package that a target needs (a container,
# a GPU machine without network), that Python is used as it is: nothing is installed, nothing is downloaded.

PYTHON ?= python3
TORCH ?= 2.15.0
SHELL := /bin/bash
export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels

# $(call has,packages): does $(PYTHON) have them all?
has = $(shell $(PYTHON) -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' $(1) \
	2>/dev/null && echo yes)
NEED_DEMO := torch numpy triton rich
NEED_GPU := torch numpy triton pytest pytest_benchmark
# The tests marked so: others import packages that a GPU machine need not have.
GPU_TESTS := tests/gpu tests/bench/test_size_list.py tests/commands/test_gpu.py
NEED_ALL := $(NEED_DEMO) pytest pytest_benchmark pytest_timeout xdist hypothesis matplotlib sklearn ruff mypy sphinx furo \
	myst_parser build hatchling
# Two files of tests run side by side. Most tests wait for ranks, so more than two would do little on two cores.
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile
NEED_INTEGRATIONS := accelerate lightning transformers ray

demo: need := $(NEED_DEMO)
gpu: need := $(NEED_GPU)
test lint docs bench: need := $(NEED_ALL)
test-all: need := $(NEED_ALL) $(NEED_INTEGRATIONS)
test-all: stamp := .venv/.ready-integrations

# Expanded in each recipe, so with the target's own `need`.
python = $(if $(call has,$(need)),$(PYTHON),.venv/bin/python)
stamp := .venv/.ready
ready = @$(if $(call has,$(need)),true,$(MAKE) --no-print-directory $(stamp))

.PHONY: demo test test-all test-torch lint bench gpu docs clean

demo:  ## train a network on real images on two ranks, beside torch's DDP
	$(ready)
	$(python) -m dpfuse.launch --nproc_per_node 2 examples/fashion_mnist.py

test: lint  ## what .ci/run does: lint, types, tests
	$(python) -m pytest -m "not gpu and not slow" --timeout 300 --durations=25 $(SIDE_BY_SIDE)

test-all: lint  ## the long tests too, and those with accelerate, Lightning, transformers and Ray; writes a record
	$(python) -m tests.recorded bench/results/test-all-cpu$$(nproc)-$$(date +%F).txt \
		-m "not gpu" --timeout 1200 --durations=25 $(SIDE_BY_SIDE)

test-torch:  ## the tests under another release, in an environment that is thrown away: make test-torch TORCH=2.15.0
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv "$$folder" && \
	"$$folder/bin/python" -m pip install --quiet "torch==$(TORCH)" --editable '.[test]' && \
	"$$folder/bin/python" -m tests.recorded bench/results/torch-$(TORCH).txt \
		-m "not gpu and not slow" --timeout 600 --durations=10 $(SIDE_BY_SIDE)

lint:
	$(ready)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

bench:  ## every benchmark; ends with a table and a plot in bench/out
	$(ready)
	$(python) -m bench

gpu:  ## GPU tests and every benchmark on a CUDA machine, no network needed; writes bench/results/<gpu>-<date>.json
	$(ready)
	failed=0; \
	timeout --signal=INT --kill-after=20 300 $(python) -W default -m pytest -W default -m gpu --durations=15 \
		$(GPU_TESTS) || failed=1; \
	$(python) -m bench --gpu || failed=1; \
	exit $$failed

docs:  ## the HTML pages, in docs/_build
	$(ready)
	$(python) -m sphinx -W --keep-going -b html docs docs/_build

clean:
	rm -rf .venv build dist docs/_build bench/out

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable '.[test]' --constraint constraints.txt
	touch $@

.venv/.ready-integrations: .venv/.ready
	.venv/bin/python -m pip install --quiet --editable '.[test,integrations]' --constraint constraints.txt
	touch $@
