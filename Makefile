# make demo   set up and run the main job on real input: figures in the terminal, plot and CSV in out/
# make test   set up and run all checks
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal -q

.PHONY: setup demo test suite smoke test-slow test-all test-oldest test-newest lint bench gpu mutants fuzz

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/python -m examples.demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint suite

# Triton decides when a kernel is decorated whether it is interpreted: two kinds of tests, two processes.
suite: setup
	$(PYTEST) tests --ignore tests/interpreter
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter tests/fuzz/test_kernels.py

# All tests with the oldest torch and triton that are supported, in .venv-oldest; torch 2.11 comes with CUDA, 5 GB in all.
test-oldest:
	$(MAKE) suite VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# Some tests with the newest triton that pip finds, beside the torch of constraints.txt, in .venv-newest.
test-newest:
	$(MAKE) setup VENV=.venv-newest
	.venv-newest/bin/pip install --quiet --upgrade triton
	$(MAKE) smoke VENV=.venv-newest

# Imports; every kernel compiled, with every feature; rotations in registers; the operator and random calls in the interpreter.
smoke: setup
	$(PYTEST) tests/cpu/test_imports.py tests/compile/test_features.py tests/compile/test_rotations.py
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter/test_ops.py tests/interpreter/test_forward.py::test_tables \
		tests/interpreter/test_backward.py::test_widths tests/fuzz/test_kernels.py

# All there is: with the long sweeps, and two minutes of fuzzing.
test-all: test test-slow
	$(MAKE) fuzz SECONDS=60

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

# Correctness and speed on a GPU, with the torch and triton that $(PYTHON) has; PARTS=smoke,speed for some of it. Without make:
# python3 -m bench.gpu --results DIR
gpu:
	$(PYTHON) -m bench.gpu --results $(or $(RESULTS),out/gpu) $(if $(PARTS),--parts $(PARTS)) $(if $(SECONDS),--seconds $(SECONDS))
