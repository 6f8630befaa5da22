# `make demo` and `make test` set up everything they need. PYTHON chooses the interpreter for the new environment.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Test processes of one thread each. A file's tests stay in one of them, which makes what they share once.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

.PHONY: setup demo test test-fast zoo lint format clean

setup: $(STAMP)

# --system-site-packages is not used: a GPU or NPU user makes $(VENV) with their own torch first, and it is kept.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet --constraint constraints.txt torch
	@$(BIN)/python -c "import torch; print('torch', torch.__version__)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[onboard,train,test,demo]"
	@touch $(STAMP)

demo: setup
	$(BIN)/python demo/run.py

test: setup lint
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m "not slow"

# Onboards all 91 families of the conformance field and writes docs/zoo.md; then all mutants, and all proofs held out.
zoo: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m zoo.conformance
	$(PYTEST) tests/zoo --zoo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/types/dayzero && for d in onboard runtime kernels templates; do ln -sfn ../../../$$d build/types/dayzero/$$d; done
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf demo/work build dist *.egg-info
