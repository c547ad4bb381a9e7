# make help says what there is. make demo and make test are where to begin.
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
# Tests start dozens of processes; each would compile torch's sources anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal -q

.PHONY: help setup demo lint test kernels long long-kernels smoke test-slow test-all test-oldest compile-oldest compile-newest models-oldest test-newest \
	test-libraries docs hub bench results gpu gpu-cache draws mutants

ALL := test kernels long long-kernels
USED := demo test test-all docs gpu

help: ## list all targets
	@for name in $(USED); do awk -F ':.*## ' -v name=$$name '$$1 == name && $$2 { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE); done
	@echo "---"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / && index(" $(USED) ", " " $$1 " ") == 0 { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE)

MAKEFILE := $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/installed ## install everything into .venv, with the versions of constraints.txt

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable ".[dev]"
	touch $@

demo: setup ## run Bach chorales through the operator: checked, measured, figures in out/
	$(BIN)/python -m examples.demo

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Triton decides when a kernel is decorated whether it is interpreted: two kinds of tests, two processes.
test: setup ## all in plain torch, and some of the kernels in Triton's interpreter: before a pull request
	$(PYTEST) tests/cpu tests/enable tests/operator -m $(QUICK)
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED) -m $(QUICK)
	@echo "Not run: the other tests of kernels, interpreted, compiled and emulated (make kernels), long cases (make long"
	@echo "long-kernels), other libraries (make test-libraries), other versions (make help)."

QUICK := "not slow and not thorough"
LONG := "thorough and not slow"
INTERPRETED := $(addprefix tests/operator/test_,draws.py sweeps.py precision.py)

kernels: setup ## the other tests of kernels: compiled, emulated, interpreted
	$(PYTEST) tests/compile tests/emulator -m $(QUICK)
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter -m $(QUICK)

long: setup ## cases marked thorough, in plain torch and in the emulator
	$(PYTEST) tests/cpu tests/enable tests/operator tests/emulator -m $(LONG)

long-kernels: setup ## cases marked thorough of compiled and interpreted kernels, and the rest of tests/operator in the interpreter
	$(PYTEST) tests/compile -m $(LONG)
	TRITON_INTERPRET=1 $(PYTEST) tests/operator tests/interpreter -m $(LONG)
	TRITON_INTERPRET=1 $(PYTEST) tests/operator $(addprefix --ignore ,$(INTERPRETED)) -m $(QUICK)

# All tests with the oldest torch and triton that are supported, in .venv-oldest; torch 2.11 comes with CUDA, 5 GB in all.
test-oldest: ## all tests with the oldest torch and triton, in .venv-oldest (5 GB)
	$(MAKE) $(ALL) VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# Every kernel compiled by the oldest triton that is supported, which torch 2.11 comes with. It refuses some things that later ones
# take: words handed from one kernel function to another, and groups of arguments that are compared with None. On Hopper it leaves
# out fences, which the package adds: the emulator checks some calls.
compile-oldest: setup ## every kernel compiles with the oldest triton, too (700 MB)
	$(BIN)/pip install --quiet --no-deps --upgrade --target .triton-oldest $(shell grep ^triton== constraints-oldest.txt)
	PYTHONPATH=.triton-oldest $(PYTEST) $(COMPILED) -m $(QUICK)
	PYTHONPATH=.triton-oldest $(PYTEST) tests/emulator/test_calls.py

# The newest that is known. Since 3.8 a named tuple in a kernel is a class of its own, whose attributes can hide a field.
compile-newest: setup ## every kernel compiles with the newest triton, too (700 MB)
	$(BIN)/pip install --quiet --no-deps --upgrade --target .triton-newest $(shell grep ^triton== constraints-newest.txt)
	PYTHONPATH=.triton-newest $(PYTEST) $(COMPILED) -m $(QUICK)

ROTATIONS := $(addprefix tests/compile/test_instructions.py::test_,$(addsuffix _in_registers,rotations_of_the_forward_stay rotations_of_the_backward_stay) \
	a_gather_uses_shared_memory)
COMPILED := $(addprefix tests/compile/test_,features.py plans.py stub_gpu.py) $(ROTATIONS) \
	tests/compile/test_instructions.py::test_products_run_side_by_side_and_registers_suffice

# The families of transformers with the oldest version that is supported.
models-oldest: setup ## the models of transformers with its oldest supported version (50 MB)
	$(BIN)/pip install --quiet --no-deps --upgrade --target .transformers-oldest \
		$(shell grep ^transformers== constraints-oldest.txt)
	PYTHONPATH=.transformers-oldest $(PYTEST) $(addprefix tests/enable/test_,families.py decoding.py replaced.py refused.py) -m $(QUICK)

# All that is newest: torch, triton and transformers of constraints-newest.txt, in .venv-newest; this torch comes with CUDA.
test-newest: ## all tests with the newest torch, triton and transformers, in .venv-newest (6 GB)
	$(MAKE) $(ALL) VENV=.venv-newest CONSTRAINTS=constraints-newest.txt

# Classes of other libraries and copies of attention in packages, enabled, and the repository for the hub, in .venv-libraries,
# which has these libraries' own files, and stand-ins for the hundreds of packages that they import beside what is tested.
# torchaudio lies beside it: its library needs CUDA, and others import it if they find it.
test-libraries: .venv-libraries/installed ## classes of other libraries, enabled, in .venv-libraries (1 GB)
	.venv-libraries/bin/python -m pytest -n 2 --dist worksteal -q tests/libraries --ignore tests/libraries/wrappers
	.venv-libraries/bin/python -m pytest -n 2 --dist worksteal -q tests/libraries/wrappers
	.venv-libraries/bin/python -m pytest -n 2 --dist worksteal -q tests/cpu/test_docs.py -k nemo

.venv-libraries/installed: requirements-libraries.txt $(CONSTRAINTS)
	$(PYTHON) -m venv .venv-libraries
	.venv-libraries/bin/pip install --quiet --constraint $(CONSTRAINTS) torch numpy pytest pytest-xdist
	.venv-libraries/bin/pip install --quiet --no-deps --requirement requirements-libraries.txt
	.venv-libraries/bin/pip install --quiet --no-deps --target .venv-libraries/beside torchaudio==2.11.0
	touch $@

# Imports; every kernel compiled, with every feature; rotations in registers; the operator and random calls in the interpreter.
smoke: setup ## imports, compiled kernels, some calls: for another version of triton
	$(PYTEST) tests/cpu/test_imports.py tests/compile/test_features.py $(ROTATIONS)
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter/test_ops.py tests/interpreter/test_calls.py::test_tables \
		tests/operator/test_draws.py

test-all: lint $(ALL) ## lint, all tests but the long sweeps, and two minutes of draws: what a pull request is held to
	$(MAKE) draws SECONDS=60

test-slow: setup ## the long sweeps, hours: before a release
	$(PYTEST) -m slow tests --ignore tests/interpreter
	TRITON_INTERPRET=1 $(PYTEST) -m slow tests/interpreter tests/operator

# The documentation as a site that needs no network, in out/docs; every warning is an error. docs/figures.py draws its figures.
docs: $(VENV)/installed-docs ## build the documentation, in out/docs
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs out/docs
	@echo "out/docs/index.html"

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[docs]"
	touch $@

# The package as the Hugging Face hub's kernels have it: docs/hub.md says how to publish it. REPO=owner/name
hub: setup ## a repository for the Hugging Face hub, in build/hub; REPO=owner/name
	$(BIN)/python -m hub $(if $(REPO),--repo $(REPO))

# Speed and memory of this package and of what it is compared with, checked first; files and figures in RESULTS.
bench: setup ## speed and memory beside other methods, and figures; RESULTS=out/bench
	$(BIN)/python -m bench speed --csv $(or $(RESULTS),out/bench)/speed.csv
	$(BIN)/python -m bench memory --csv $(or $(RESULTS),out/bench)/memory.csv
	$(BIN)/python -m bench plot $(or $(RESULTS),out/bench)/speed.csv $(or $(RESULTS),out/bench)/memory.csv --out $(or $(RESULTS),out/bench)

CPU_RESULTS := bench/results/cpu
results: setup ## measure the CPU's figures of README and docs again, and write them there: hours, with nothing beside
	$(BIN)/python -m bench speed --cases cpu --csv $(CPU_RESULTS)/speed.csv
	$(BIN)/python -m bench memory --cases cpu --csv $(CPU_RESULTS)/memory.csv
	$(BIN)/python -m bench speed --cases cpu_bias --csv $(CPU_RESULTS)/bias.csv
	$(BIN)/python -m bench speed --new-lengths 200 --csv $(CPU_RESULTS)/lengths.csv
	$(BIN)/python -m bench speed --cases short,decode --csv $(CPU_RESULTS)/short.csv
	$(BIN)/python -m bench models --lengths 512,2048,4096 --csv $(CPU_RESULTS)/models.csv
	$(BIN)/python -m bench plot $(addprefix $(CPU_RESULTS)/,speed.csv memory.csv models.csv) --out $(CPU_RESULTS)
	$(BIN)/python -m bench readme

# Calls that hypothesis thinks of, for SECONDS each in plain torch and the kernels; a failure is shrunk and printed as a command.
draws: setup ## search for calls that go wrong; SECONDS=300 SEED=0
	$(BIN)/python -m tests.draws --seconds $(or $(SECONDS),300) --seed $(or $(SEED),0)
	$(BIN)/python -m tests.draws --seconds $(or $(SECONDS),300) --seed $(or $(SEED),0) --kernels

# Faults, each put into a copy of the repository: which test notices it? Known ones, or so many drawn at random. JOBS=2.
mutants: setup ## faults put into copies: do the tests notice? ONLY=names GENERATE=40 JOBS=1
	$(BIN)/python -m tools.mutants --jobs $(or $(JOBS),1) $(if $(ONLY),--only $(ONLY)) $(if $(GENERATE),--generate $(GENERATE))

# Correctness and speed on a GPU, with the torch and triton that $(PYTHON) has; PARTS=correctness,speed for some of it. Without make:
# python3 -m bench.gpu --results DIR
gpu: ## correctness and speed on a GPU; RESULTS=out/gpu PARTS=correctness,speed SECONDS=750
	$(PYTHON) -m bench.gpu --results $(or $(RESULTS),out/gpu) $(if $(PARTS),--parts $(PARTS)) $(if $(SECONDS),--seconds $(SECONDS))

# The kernels that bench/gpu/check.sh and measure.sh need, compiled here for an H100 there: bench/gpu/README.md.
gpu-cache: .venv-gpu/installed ## compile all that is measured on a GPU, into .gpu/kernels.tar.xz (4.5 GB, half an hour)
	PYTHON=.venv-gpu/bin/python bash bench/gpu/cache.sh

.venv-gpu/installed:
	$(or $(GPU_PYTHON),python3.12) -m venv .venv-gpu
	.venv-gpu/bin/pip install --quiet --no-compile torch==$(or $(GPU_TORCH),2.11.0) numpy
	touch $@
