# make demo   set up, train a real GPT through a killed worker, say where the timeline is
# make test   set up, then lint, types and tests: everything worth having on every change
# make quick  set up, then the tests without processes, browsers, long searches and real models
# make soak   set up, then the tests too long for every change
# make matrix set up, then tests with every installed interpreter, torch and megatron-core; make matrix-setup installs some
# make explore   random runs of the control plane under a virtual clock, for MINUTES: see docs/measurements/testing.md
# make site   docs, API reference, a gallery of schedules and a playground as a static site, into build/site
# make screenshots   pictures of the viewer: those of docs/guides/viewer.md into docs/pictures, all of them into build/pictures
#
# PYTHON chooses the interpreter (3.11 or newer); another one than last time makes the environment anew.

PYTHON ?= python3
MATRIX_PYTHON ?= $(PYTHON)
VENV := .venv
BIN := $(VENV)/bin
# Test processes: half again as many as cores, since those of runs wait for their workers; twice as many gain nothing.
JOBS ?= $(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 )))

# Compiled files are kept even where the environment forbids it: tests start hundreds of Python processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick soak explore matrix matrix-setup gpu lint types kernels bytecode tests faults benchmarks screenshots site clean

demo: $(VENV)/.installed
	$(BIN)/python examples/tiny_gpt/demo.py

test: $(VENV)/.installed
	nice -n 10 $(MAKE) --no-print-directory -j 3 lint types kernels bytecode  # as kernels have it, so that all end together
	$(MAKE) --no-print-directory tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# What searches compile, once, as the types take one core only; else each process of the tests would compile it.
kernels: $(VENV)/.installed
	$(BIN)/python -m recycle.solve.search.compile_kernels $(VENV)/.compiling

# Compiles what tests import, once, beside the types; else each process of the tests would compile it.
bytecode: $(VENV)/.installed
	-@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --collect-only -qq > /dev/null

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 20

tests: $(VENV)/.installed
	$(PYTEST)

# What needs neither processes nor a browser nor long searches nor a real model: a minute and a half on 2 cores.
quick: $(VENV)/.installed
	$(PYTEST) -m "not (process or browser or search or etcd or slow or soak)"

# What takes too long for every change: the whole fault matrix, long runs, large grids.
soak: $(VENV)/.installed
	$(PYTEST) -m soak --timeout 1800 -o faulthandler_timeout=2400

# Random faults in whole runs of one process; EXPLORE_OPTIONS are options of tests.exec.explore.
MINUTES ?= 10
explore: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.exec.explore --minutes $(MINUTES) --jobs 2 $(EXPLORE_OPTIONS)

# The tests of tests/matrix.py in each environment of build/matrix, and in this one; MATRIX_OPTIONS are its options.
matrix: $(VENV)/.installed
	$(BIN)/python -m tests.matrix --jobs $(JOBS) $(MATRIX_OPTIONS)

# An environment in build/matrix, of several gigabytes: MATRIX_PYTHON=python3.13, and another torch by MATRIX_TORCH=2.14.1.
matrix-setup:
	$(MATRIX_PYTHON) -m tests.matrix --setup $(if $(MATRIX_TORCH),--torch $(MATRIX_TORCH))

# Strikes every fault in every phase and writes the tables of docs/reference/faults.md.
faults: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.exec.fault_matrix

# Every page of the viewer, light and dark, at 1280 and 2560 pixels, to be looked at.
screenshots: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python docs/screenshots.py
	$(BIN)/python docs/animation.py

site: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[site]'
	$(BIN)/python docs/site.py

# What only a GPU shows, on one card, with the torch and megatron-core of python3: ten minutes; see docs/reference/support.md.
gpu:
	python3 -W ignore -m benchmarks.gpu --write benchmarks/results/gpu.json

# Over an hour, most of it the planner's large rows.
benchmarks: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/ir.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/planner_random.py
	$(BIN)/python benchmarks/planner_rivals.py
	$(BIN)/python -W ignore benchmarks/executor.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python -W ignore -m benchmarks.peers
	$(BIN)/python -W ignore benchmarks/soak.py
	$(BIN)/python benchmarks/staggered.py
	$(BIN)/python -W ignore benchmarks/checkpoint.py
	$(BIN)/python benchmarks/viewer.py

# The stamp is newer than what it was made from, and holds the interpreter it was made with. pip would compile 17,700 files
# on one core, of which the tests import 3,600; Python compiles those when they are first imported.
$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.python
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.python: FORCE
	@wanted="$$($(PYTHON) -c 'import sys; print(sys.version, sys.base_prefix)')" || exit 1; \
	if [ "$$(cat $@ 2>/dev/null)" != "$$wanted" ]; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "recycle needs Python 3.11 or newer; set PYTHON=")' || exit 1; \
	  rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) && echo "$$wanted" > $@; \
	fi

clean:
	rm -rf $(VENV) build dist runs *.egg-info

FORCE:
