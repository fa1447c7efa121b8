# `make demo` and `make test` each set everything up first: a virtual environment in this folder, then the installs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread a process: the tests themselves run on two workers.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo test lint types unit matrix sweep bench format clean

demo: $(READY)
	$(BIN)/python -m examples.train_gpt

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist worksteal -q

matrix: $(READY)
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist worksteal -q -m matrix

# Every operator and module of PyTorch's own test databases, split and compared with plain autograd.
sweep: $(READY)
	$(TEST_ENV) $(BIN)/python -m tests.sweep --table tests/sweep.csv

bench: $(READY)
	$(BIN)/python -m benchmarks.capture_scale
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.rank_schedules
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.split_cost

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
