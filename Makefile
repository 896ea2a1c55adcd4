# Set-up, build, test and run; `make help` lists the targets. The work is done by scripts in tools/.
# A step runs again when something it depends on is newer than its stamp.
.DEFAULT_GOAL := help
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory
# Two pips at once in one environment undo each other; ninja uses all cores by itself.
.NOTPARALLEL:

STAMPS := .venv/stamps
NUM_RANKS ?= 2
RANKS := .venv/bin/python -m sok_like.run -np $(NUM_RANKS)

.PHONY: help venv build demo test test-all bench bench-dmp bench-groups soak lint cuda asan tsan soak-ranks
.PHONY: clean distclean

help:
	@echo "make venv       environment .venv: pinned requirements, Horovod, this package"
	@echo "make demo       train examples/flights.py on NUM_RANKS=2 ranks; draws into out/"
	@echo "make test       the tests; ARGS=... goes to pytest"
	@echo "make test-all   the slow ones and the full grids, too"
	@echo "make bench      benchmarks, on 1 rank; ARGS=... goes to the program"
	@echo "make bench-dmp  sharded against replicated dense tables, on NUM_RANKS=2 ranks"
	@echo "make bench-groups  many tables in one lookup, on NUM_RANKS=2 ranks"
	@echo "make soak       20 minutes at a full table: memory stays flat, counts add up"
	@echo "make lint       ruff, mypy, clang-format"
	@echo "make cuda       build with the CUDA backend, where nvcc is"
	@echo "make soak-ranks random programs on 2 and 3 ranks; ARGS='--steps 20000'"
	@echo "make asan tsan  C++ tests and op library under address and undefined, or thread sanitizer"
	@echo "make fuzz       50,000 damaged dumps: each is refused or read right; ARGS=..."
	@echo "make crash      200 processes killed while they dump; ARGS=..."
	@echo "make clean      remove what was built; make distclean removes .venv as well"
	@echo "PYTHON=..., CXX=... and SOK_CACHE=... choose the Python, the compiler, the wheel cache"

$(STAMPS)/requirements: $(wildcard requirements/*.txt) tools/make_venv.sh tools/phase.sh
	@tools/make_venv.sh
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/horovod: $(STAMPS)/requirements sok_like/install_horovod.py
	@.venv/bin/python -W ignore -m sok_like.install_horovod
	@touch $@

$(STAMPS)/package: $(STAMPS)/requirements pyproject.toml setup.py tools/install_package.sh
	@tools/install_package.sh
	@touch $@

venv: $(STAMPS)/horovod build

# Ninja, not make, knows which sources changed.
build: $(STAMPS)/package
	@tools/build.sh

demo: venv
	@tools/demo.sh $(NUM_RANKS) $(ARGS)

test: venv
	@tools/test.sh $(ARGS)

test-all: venv
	@SLOW=1 tools/test.sh $(ARGS)

bench: venv
	@.venv/bin/python -m benchmarks $(ARGS)

bench-dmp: venv
	@$(RANKS) -m benchmarks.dmp $(ARGS)
	@.venv/bin/python -m benchmarks.dmp_memory --ranks $(NUM_RANKS)

bench-groups: venv
	@$(RANKS) -m benchmarks --only groups $(ARGS)

soak: venv
	@$(RANKS) -m benchmarks.soak $(ARGS)

lint: $(STAMPS)/requirements
	@tools/lint.sh

cuda: $(STAMPS)/requirements
	@tools/build_cuda.sh

soak-ranks: venv
	@.venv/bin/python -m tests.soak_ranks $(ARGS)

asan: venv
	@tools/test_cpp.sh build-asan address,undefined
	@tools/sanitize_ops.sh build-asan-ops address,undefined

tsan: venv
	@tools/test_cpp.sh build-tsan thread
	@tools/sanitize_ops.sh build-tsan-ops thread

.PHONY: fuzz crash
fuzz: venv
	@.venv/bin/python -m tests.table.dump_fuzz $(ARGS)

crash: venv
	@.venv/bin/python -m tests.table.dump_crash $(ARGS)

clean:
	rm -rf build build-* dist out *.egg-info sok_like/*.so $(STAMPS)/package
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache

distclean: clean
	rm -rf .venv
