# Two commands do everything on a fresh machine: `make demo` and `make test`.
# An environment is made once: .venv-demo for the demos, .venv for all else. Where $(PYTHON) already has every package
# that a target needs (a container, a GPU machine without network), it is used as it is, and nothing is downloaded.

PYTHON ?= python3
TORCH ?= 2.15.0
OUT ?= bench/out
MINUTES ?= 60
SHELL := /bin/bash
export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels
# Tests start hundreds of processes. Without bytecode on disk, each of them would compile dpfuse and the tests again.
unexport PYTHONDONTWRITEBYTECODE

# The packages of $(need) that $(PYTHON) has not.
lacks = $(shell $(PYTHON) -c 'import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])' \
	$(need) 2>/dev/null || echo $(need))
NEED_DEMO := torch numpy rich sklearn
NEED_GPU := torch numpy triton pytest pytest_benchmark
NEED_ALL := $(NEED_DEMO) triton pytest pytest_benchmark pytest_timeout xdist hypothesis matplotlib ruff mypy yaml check_jsonschema twine sphinx furo \
	myst_parser sphinx_copybutton sphinx_reredirects build hatchling
# Two files of tests run side by side. Most tests wait for ranks, so more than two would do little on two cores.
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile
NEED_INTEGRATIONS := accelerate lightning transformers ray torchft

NEED_WHEEL := torch numpy triton build hatchling

demo demo-fault demo-preempted: need := $(NEED_DEMO)
demo demo-fault demo-preempted: stamp := .venv-demo/.ready
wheel: need := $(NEED_WHEEL)
gpu gpu-questions: need := $(NEED_GPU)
gpu-questions: MINUTES = 6
test test-programs test-failures lint docs bench: need := $(NEED_ALL)
test-all test-clients test-nightly: need := $(NEED_ALL) $(NEED_INTEGRATIONS)
test-all test-clients test-nightly: stamp := .venv/.ready-integrations

# Expanded in each recipe, so with the target's own `need`.
python = $(if $(lacks),$(dir $(stamp))bin/python,$(PYTHON))
stamp := .venv/.ready
ready = @$(if $(lacks),$(MAKE) --no-print-directory $(stamp) lacks="$(lacks)",true)

.PHONY: demo demo-fault demo-preempted wheel test test-all test-clients test-nightly test-programs test-failures test-public test-torch test-pretended lint bench gpu gpu-questions docs clean

demo: demo-fault  ## and then train a network on real images on two ranks, beside torch's DDP
	$(ready)
	$(python) -m dpfuse.launch --nproc_per_node 2 examples/fashion_mnist.py

demo-fault:  ## train with another learning rate on one of two ranks: what torch's DDP and dpfuse say of it
	$(ready)
	$(python) -m dpfuse.launch --nproc_per_node 2 examples/fault.py

demo-preempted:  ## stop a training twice by a signal to one rank, go on with another number of ranks, count the samples
	$(ready)
	$(python) examples/preempted.py --play

test: lint  ## what .ci/run does: lint, types, tests
	$(python) -m pytest -m "not gpu and not slow" --timeout 300 --durations=25 $(SIDE_BY_SIDE)

test-all: lint  ## the long tests too, and those with accelerate, Lightning, transformers and Ray; writes a record
	$(python) -m tests.recorded bench/results/test-all-cpu$$(nproc)-$$(date +%F).txt \
		-m "not gpu and not nightly" --timeout 1200 --durations=25 $(SIDE_BY_SIDE)
	$(PYTHON) -m tests.pretended_gpu 2.11.0 build/pretended-gpu-2.11.0 --shard

test-clients:  ## programs in the shape of public ones, and test scripts of accelerate, beside torch's class
	$(ready)
	$(python) -m pytest tests/clients --timeout 1200 --durations=10 $(SIDE_BY_SIDE)

test-nightly:  ## those, and what takes minutes each: 100,000 steps, 1,000 models, the doctor's programs
	$(ready)
	$(python) -m tests.recorded bench/results/test-nightly-cpu$$(nproc)-$$(date +%F).txt \
		-m nightly --timeout 3600 --durations=10 $(SIDE_BY_SIDE)

test-programs:  ## 4,000 training programs made at random, beside gradients averaged by hand or torch's class; a record
	$(ready)
	$(python) -m tests.random_programs bench/results/random-programs-cpu$$(nproc)-$$(date +%F).txt

test-failures:  ## a backward of one rank fails at every line and in its program: what all ranks do then; POLICY=SKIP STEP=1 for a part
	$(ready)
	$(python) -m tests.distributed.failures.opening --turns --after 30 --stop 0 $(if $(POLICY),--policy $(POLICY)) $(if $(STEP),--step $(STEP)) \
		--record bench/results/failures$(if $(POLICY),-$(POLICY))$(if $(STEP),-$(STEP))-cpu$$(nproc)-$$(date +%F).txt

test-public:  ## programs around public libraries, with torch's class and with ours, in an environment of their own
	@$(MAKE) --no-print-directory .venv-public/.ready
	.venv-public/bin/python -m tests.recorded bench/results/test-public-cpu$$(nproc)-$$(date +%F).txt \
		tests/clients/test_public_programs.py --timeout 1200 --durations=15

test-torch:  ## the tests under another release, in an environment that is thrown away: make test-torch TORCH=2.15.0
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv "$$folder" && \
	"$$folder/bin/python" -m pip install --quiet "torch==$(TORCH)" --editable '.[test]' && \
	"$$folder/bin/python" -m tests.recorded bench/results/torch-$(TORCH).txt \
		-m "not gpu and not slow" --timeout 600 --durations=10 $(SIDE_BY_SIDE)

test-pretended:  ## the CUDA path on pretended GPUs, two ranks under a race detector, with two releases of torch: needs g++, 6 GB
	$(PYTHON) -m tests.pretended_gpu 2.11.0 build/pretended-gpu-2.11.0
	$(PYTHON) -m tests.pretended_gpu 2.15.0 build/pretended-gpu-2.15.0 --ranks

lint:
	$(ready)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

bench:  ## every benchmark; ends with a table and a plot in bench/out
	$(ready)
	$(python) -m bench

gpu:  ## all that needs a CUDA machine, in MINUTES; goes on where the last run of this commit stopped
	$(ready)
	$(if $(NCCL),LD_PRELOAD=$(NCCL)) $(python) -m bench.gpu_run --minutes $(MINUTES) --out "$(OUT)" $(if $(AGAIN),--again)

gpu-questions:  ## open questions that only a CUDA machine can answer, in MINUTES, to OUT
	$(ready)
	$(if $(NCCL),LD_PRELOAD=$(NCCL)) $(python) -m bench.gpu_questions --minutes $(MINUTES) --out "$(OUT)"

docs:  ## the HTML pages, in docs/_build
	$(ready)
	$(python) -m sphinx -W --keep-going -b html docs docs/_build

wheel:  ## dist/dpfuse-….whl, installed without network into a fresh environment, where two ranks train
	$(ready)
	rm -f dist/*.whl
	$(python) -m build --wheel --no-isolation --outdir dist
	$(python) -m tests.check_wheel dist/*.whl

clean:
	rm -rf .venv .venv-demo .venv-public build dist docs/_build bench/out

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable '.[test]' --constraint constraints.txt
	touch $@

.venv/.ready-integrations: .venv/.ready
	.venv/bin/python -m pip install --quiet --editable '.[test,integrations]' --constraint constraints.txt
	touch $@

.venv-demo/.ready: pyproject.toml constraints.txt
	@echo "$(PYTHON) lacks $(lacks): installing torch, numpy, rich and scikit-learn into $(@D), once; torch may take minutes"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]' \
		--constraint constraints.txt
	@touch $@

.venv-public/.ready: tests/clients/public/requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-public
	.venv-public/bin/python -m pip install --quiet --upgrade pip
	.venv-public/bin/python -m pip install --quiet --editable '.[bench]' pytest-timeout \
		--requirement tests/clients/public/requirements.txt --constraint constraints.txt
	touch $@
