# make train      the main job: a small Llama on Python's own source code, as shards of tokens, 8 ranks, tensor x pipeline x data
# make test       lint, types and the quick tests, in two workers, ten minutes on two cores; WORKERS=1 runs one test after the other
# make test-slow  the other default tests, 25 minutes on two cores
# make test-full  the long sweeps, hours, in 12 shards whose results are kept; SHARD=3/12 is one of them; AGAIN=1 and AGAIN=failed run again
# make test-cuda  the CUDA paths on simulated GPUs, with torch's CUDA build in an environment of its own; see tools/cuda_sim/README.md
# make test-lowest  `make test` with the lowest version of each package that pyproject.toml allows, in an environment of its own
# make docs       the documentation, into site/
# make browser    installs Chromium, in which `make test` looks at the report pages, with the system's package manager
# make test-faults  a hundred runs that are killed while they save, and go on; FAULTS_SEED=N repeats what seed N gave
# make test-chaos  30 minutes on 8 ranks with a fault a minute: kills, hangs, NaN, flipped bits, a full disk, a cut network; ARGS="--seed 3"
# make fuzz        100,000 damaged and hostile names, configurations and files; ARGS="--seed 3 --only checkpoint"
# Each makes the environment it needs in .venv first. `make train ARGS="parallelism=tp4_pp2"` passes overrides on.

PYTHON ?= python3
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
LOWEST_VENV ?= .venv-lowest
ARGS ?=
SHARD ?=
AGAIN ?=
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The CPU build of torch; a range would bring gigabytes of CUDA to a machine that has no use for them.
CPU_TORCH := torch==2.13.0

DEFAULT := not full and not faults and not cuda and not gpu

.PHONY: train test test-slow test-full test-faults test-chaos test-cuda test-lowest fuzz lint types style imports docs browser clean-venv
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	$(BIN)/python train.py $(if $(filter data=% recipe=%,$(ARGS)),,data=python_tokens) $(ARGS)

test: lint
	$(BIN)/python -m pytest -m "not slow and $(DEFAULT)" -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "slow and $(DEFAULT)" -n $(WORKERS) --dist loadfile $(ARGS)

test-full: $(VENV)/.installed-test
	$(BIN)/python tools/test_full.py --shard "$(SHARD)" --again="$(AGAIN)" -- $(ARGS)

test-faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m faults $(ARGS)

test-chaos: $(VENV)/.installed-test
	$(BIN)/python tools/chaos/chaos.py $(ARGS)

fuzz: $(VENV)/.installed-test
	$(BIN)/python tools/fuzz.py $(ARGS)

test-cuda: $(CUDA_VENV)/.installed
	$(CUDA_VENV)/bin/python -m pytest tests/cuda -m cuda -n $(WORKERS) --dist worksteal $(ARGS)

test-lowest: $(LOWEST_VENV)/.installed
	$(LOWEST_VENV)/bin/python -m pytest -m "not slow and $(DEFAULT)" -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory --jobs=2 types style imports

types:
	$(BIN)/mypy

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .

imports:
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/.installed-test
	$(BIN)/python docs/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

browser:
	@sh tools/install_chromium.sh

clean-venv:
	rm -rf $(VENV) $(CUDA_VENV) $(LOWEST_VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	if $(BIN)/python -c "import torch" 2>/dev/null; then echo "torch is there"; \
	elif nvidia-smi -L >/dev/null 2>&1; then echo "an NVIDIA GPU: torch comes with the package"; \
	else $(PIP) install "$(CPU_TORCH)"; fi
	touch $@

$(VENV)/.installed: pyproject.toml setup.py $(VENV)/.torch
	$(PIP) install -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -e ".[test]"
	touch $@

$(CUDA_VENV)/.installed: $(VENV)/.installed-test $(wildcard tools/cuda_sim/*.py tools/cuda_sim/native/*)
	$(BIN)/python tools/cuda_sim/make_environment.py $(CUDA_VENV) $(BIN)/python
	touch $@

# uv can choose the lowest versions, which pip cannot. It does not read pip's settings.
$(LOWEST_VENV)/.installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip --disable-pip-version-check install uv
	$(LOWEST_VENV)/bin/uv pip install --python $(LOWEST_VENV)/bin/python --resolution lowest-direct \
	    $(if $(PIP_INDEX_URL),--index-url "$(PIP_INDEX_URL)") -e ".[test]"
	touch $@
