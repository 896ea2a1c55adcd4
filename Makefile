# Set-up, build, test and run; `make help` lists the targets. The work is done by scripts in tools/.
# A step runs again when something it depends on is newer than its stamp.
.DEFAULT_GOAL := help
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory
# Two pips at once in one environment undo each other; ninja uses all cores by itself.
.NOTPARALLEL:

# `TF=2.18.1` behind a target chooses another TensorFlow, whose environment lies beside the default one.
DEFAULT_TF := 2.21.0
TF ?= $(DEFAULT_TF)
OTHER := $(filter-out $(DEFAULT_TF),$(TF))
export TF
export VENV := .venv$(OTHER:%=-%)
export SOK_BUILD := build$(OTHER:%=-%)
export OPS_SUFFIX := $(OTHER:%=.%)

STAMPS := $(VENV)/stamps
NUM_RANKS ?= 2
RANKS := $(VENV)/bin/python -m sok_like.run -np $(NUM_RANKS)

.PHONY: help venv build demo test test-all bench bench-dmp bench-engines bench-groups bench-saving bench-storage predict soak lint cuda fake-gpu asan tsan soak-ranks
.PHONY: clean distclean

help:
	@echo "make venv       environment .venv: pinned requirements, this package"
	@echo "                TF=2.16.2 and TF=2.18.1 make another beside it, also for demo, test, bench"
	@echo "make test-matrix  a selection of the tests on every TensorFlow; prints a table"
	@echo "make next       the same on tf-nightly and keras-nightly, in an environment of its own"
	@echo "make horovod    compiles Horovod into the environment; make test does so, too"
	@echo "make wheel      a wheel in dist/, of the TensorFlow that TF= chooses"
	@echo "make demo       train examples/flights.py on NUM_RANKS=2 ranks; draws into out/"
	@echo "make test       the tests; ARGS=... goes to pytest"
	@echo "make test-all   the slow ones and the full grids, too"
	@echo "make bench      benchmarks, on 1 rank; ARGS=... goes to the program"
	@echo "make bench-dmp  sharded against replicated dense tables, on NUM_RANKS=2 ranks"
	@echo "make bench-saving  dumps, deltas and restores, beside cp and a checkpoint"
	@echo "make bench-storage  rows on disk against rows in memory; ARGS='--path DIRECTORY'"
	@echo "make bench-engines  exchanges and steps on 2 and 4 ranks, by MPI and by Horovod"
	@echo "make bench-groups  many tables in one lookup, on NUM_RANKS=2 ranks"
	@echo "make predict    the time of a step on any number of ranks; ARGS='--measure --machine FILE'"
	@echo "make soak       20 minutes at a full table: memory stays flat, counts add up"
	@echo "make lint       ruff, mypy, clang-format"
	@echo "make docs       the site, in out/site; the first time it makes .venv-docs"
	@echo "make docs-check opens the site in Chromium: links, a narrow screen, the search"
	@echo "make cuda       build with the CUDA backend, where nvcc is"
	@echo "make fake-gpu   device tables under TensorFlow's own GPU runtime, without a GPU"
	@echo "make soak-ranks random programs on 2 and 3 ranks; ARGS='--steps 20000'"
	@echo "make asan tsan  C++ tests and op library under address and undefined, or thread sanitizer"
	@echo "make mutants    plants bugs in the CUDA backend: the emulator's tests find each; ARGS=..."
	@echo "make fuzz       50,000 damaged dumps, 3,000 damaged files of Keras and TensorFlow: each is"
	@echo "                refused or read right; ARGS=... are those of the dumps"
	@echo "make crash      all that writes files interrupted and killed at hundreds of moments"
	@echo "make clean      remove what was built; make distclean removes .venv as well"
	@echo "PYTHON=..., CXX=... and SOK_CACHE=... choose the Python, the compiler, the wheel cache"

$(STAMPS)/requirements: $(wildcard requirements/*.txt requirements/tensorflow/*.txt) tools/make_venv.sh tools/phase.sh
	@tools/make_venv.sh
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/horovod: $(STAMPS)/requirements sok_like/install_horovod.py
	@$(VENV)/bin/python -W ignore -m sok_like.install_horovod
	@touch $@

$(STAMPS)/package: $(STAMPS)/requirements pyproject.toml setup.py tools/install_package.sh
	@tools/install_package.sh
	@touch $@

venv: $(STAMPS)/requirements build

# Tests and benchmarks also run on Horovod, which takes minutes to compile.
.PHONY: horovod
horovod: $(STAMPS)/horovod

# Ninja, not make, knows which sources changed.
build: $(STAMPS)/package
	@tools/build.sh

demo: venv
	@tools/demo.sh $(NUM_RANKS) $(ARGS)

test: venv horovod
	@tools/test.sh $(ARGS)

test-all: venv horovod
	@SLOW=1 tools/test.sh $(ARGS)

.PHONY: test-matrix next wheel
test-matrix:
	@tools/test_matrix.sh $(ARGS)

next:
	@tools/next.sh

wheel: venv
	@tools/wheel.sh

bench: venv
	@$(VENV)/bin/python -m benchmarks $(ARGS)

bench-dmp: venv horovod
	@$(RANKS) -m benchmarks.dmp $(ARGS)
	@$(VENV)/bin/python -m benchmarks.dmp_memory --ranks $(NUM_RANKS)

bench-saving: venv
	@$(VENV)/bin/python -m benchmarks.saving $(ARGS)

bench-storage: venv
	@$(VENV)/bin/python -m benchmarks.storage $(ARGS)

bench-engines: venv horovod
	@$(VENV)/bin/python -m benchmarks.engines $(ARGS)

bench-groups: venv
	@$(RANKS) -m benchmarks --only groups $(ARGS)

predict: venv
	@$(VENV)/bin/python -m benchmarks.predict $(ARGS)

soak: venv
	@$(RANKS) -m benchmarks.soak $(ARGS)

lint: $(STAMPS)/requirements
	@tools/lint.sh

.PHONY: docs docs-check
docs: .venv-docs/stamps/requirements
	@tools/docs.sh

docs-check: docs
	@tools/docs.sh check

.venv-docs/stamps/requirements: requirements/docs.txt requirements/constraints.txt
	@tools/docs.sh venv
	@mkdir -p $(@D) && touch $@

cuda: $(STAMPS)/requirements
	@tools/build_cuda.sh

fake-gpu: venv
	@tools/fake_gpu.sh $(ARGS)

soak-ranks: venv
	@$(VENV)/bin/python -m tests.checks.programs $(ARGS)

asan: venv
	@tools/test_cpp.sh build-asan address,undefined
	@tools/sanitize_ops.sh build-asan-ops address,undefined

tsan: venv
	@tools/test_cpp.sh build-tsan thread
	@tools/sanitize_ops.sh build-tsan-ops thread

.PHONY: fuzz crash mutants
mutants: $(STAMPS)/requirements
	@$(VENV)/bin/python -m tests.cuda.mutants $(ARGS)

fuzz: venv
	@$(VENV)/bin/python -m tests.saving.fuzz $(ARGS)

crash: venv
	@$(VENV)/bin/python -m tests.saving.interrupts $(ARGS)

clean:
	rm -rf build build-* dist out *.egg-info sok_like/*.so .venv*/stamps/package
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache

distclean: clean
	rm -rf .venv .venv-*
