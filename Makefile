# `make demo` and `make test` each work on a fresh machine with Python 3.10 or newer; neither needs the other.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Ascend's torch_npu, too, works with a CPU build of torch only.
CPU_ONLY := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo yes)
CONSTRAINTS := $(if $(CPU_ONLY),-c constraints-cpu.txt,)

.PHONY: setup demo test lint types format clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[vision]'
	touch $@

demo: setup
	$(BIN)/python -m lctrain recipe=llama_tiny_32k

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[vision,s3,mlflow,test,dev]'
	touch $@

test: $(VENV)/.tested
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.tested
	$(BIN)/mypy

format: $(VENV)/.tested
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
