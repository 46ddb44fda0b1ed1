# make train      the main job: a small Llama on Python's own source code, 8 ranks, tensor x pipeline x data
# make test       lint, types and tests, on two cores; WORKERS=1 runs them one after the other
# make test-full  the long sweeps
# make docs       the documentation, into site/
# make test-faults  a hundred runs that are killed while they save, and go on; FAULTS_SEED=N repeats what seed N gave
# Each makes the environment it needs in .venv first. `make train ARGS="parallelism=tp4_pp2"` passes overrides on.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The CPU build of torch; a range would bring gigabytes of CUDA to a machine that has no use for them.
CPU_TORCH := torch==2.13.0

.PHONY: train test test-full test-faults lint docs clean-venv
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	$(BIN)/python train.py $(ARGS)

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-full: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m full $(ARGS)

test-faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m faults $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.installed-test
	$(BIN)/python docs/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

clean-venv:
	rm -rf $(VENV)

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
