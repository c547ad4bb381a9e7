# make demo   set up and run the main job on real input: figures in the terminal, plot and CSV in out/
# make test   set up and run all checks
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal -q

.PHONY: setup demo test test-slow lint bench gpu mutants fuzz

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/python -m triton_relattn

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Triton decides when a kernel is decorated whether it is interpreted: two kinds of tests, two processes.
test: lint
	$(PYTEST) tests --ignore tests/interpreter
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter tests/fuzz/test_kernels.py

test-slow: setup
	$(PYTEST) -m slow tests --ignore tests/interpreter
	TRITON_INTERPRET=1 $(PYTEST) -m slow tests/interpreter

# Speed and memory of this package and of what it is compared with, checked first; files and figures in RESULTS.
bench: setup
	$(BIN)/python -m bench speed --csv $(or $(RESULTS),out/bench)/speed.csv
	$(BIN)/python -m bench memory --csv $(or $(RESULTS),out/bench)/memory.csv
	$(BIN)/python -m bench plot $(or $(RESULTS),out/bench)/speed.csv $(or $(RESULTS),out/bench)/memory.csv --out $(or $(RESULTS),out/bench)

# Calls that hypothesis thinks of, for SECONDS each on blockwise and kernels; a failure is shrunk and printed as a command.
fuzz: setup
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),300) --seed $(or $(SEED),0)
	TRITON_INTERPRET=1 $(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),300) --seed $(or $(SEED),0) --kernels

# Known faults, each put into a copy of the repository: which test notices it? ONLY=names, JOBS=2.
mutants: setup
	$(BIN)/python -m tests.mutants --jobs $(or $(JOBS),1) $(if $(ONLY),--only $(ONLY))

# Correctness and speed on a GPU, with the torch and triton that $(PYTHON) has; PARTS=correctness,speed for some of it.
gpu:
	$(PYTHON) -m bench.gpu --results $(or $(RESULTS),out/gpu) $(if $(PARTS),--parts $(PARTS)) $(if $(SECONDS),--seconds $(SECONDS))
