# Everything runs in .venv, made on first use. PYTHON: the interpreter to make it with (3.11 or newer).
# CONSTRAINTS: pinned versions; empty to let pip choose.
# TORCH_INDEX: where PyTorch's CPU builds are, taken on Linux where no GPU is found (elsewhere pip's own index has such
# builds); another index that has them, or empty to leave the choice to pip. GPU: what stands for one.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
GPU ?= $(wildcard /dev/nvidia0 /dev/kfd /dev/dxg)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# A torch that is there already stays; an index that does not answer within seconds is done without.
CPU_TORCH = if [ "$$(uname -s)" != Linux ] || $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then :; \
	elif ! $(BIN)/python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/torch/", timeout=5)' $(TORCH_INDEX) 2>/dev/null; then \
	  echo "$(TORCH_INDEX) cannot be reached: torch comes from pip's own index, maybe with CUDA (TORCH_INDEX=URL names another)"; \
	else $(PIP) --no-deps --index-url $(TORCH_INDEX) 'torch>=2.6'; fi
DATA ?= ../shared/data
OUT ?= runs/bench
CASES ?= 20000
SEED ?= 0
SCHEMAS ?= 20000
WORK ?= runs/searches

.PHONY: demo test test-all test-matrix test-costs soak fuzz lint bench gpu searches docs wheel clean

demo: $(VENV)/installed
	@$(BIN)/decodery demo

# What a change needs to be trusted: units, and every invariant of every method, on tiny models. DECODERY_SEED, today's
# date if none is given, chooses the rows that stand for a matrix, and which of the long tests run.
test: $(VENV)/installed-test
	DECODERY_MATRIX=few $(BIN)/python -m pytest -m "not integration" tests/unit tests/conformance

# All tests, and more rows of every matrix: the real model, servers, browsers, processes, pages, and the scripts of
# benchmarks as well.
test-all: $(VENV)/installed-test
	$(BIN)/python -m pytest

# The same with every combination of methods, where the others take pairs of kinds: about twice as long.
test-matrix: $(VENV)/installed-test
	DECODERY_MATRIX=full $(BIN)/python -m pytest

# The CPU time of every test, by which the long ones take turns: tests/costs.json. All rows, so that none is left out of
# turn; one process, an idle machine. TESTS: files alone whose costs are recorded, beside those of the others.
test-costs: $(VENV)/installed-test
	DECODERY_MATRIX=full PYTHONPATH=tests/support $(BIN)/python -m pytest -n 0 -p record_costs $(TESTS)

# The same with longer texts and many more draws, for hours.
soak: $(VENV)/installed-test
	DECODERY_MATRIX=deep $(BIN)/python -m pytest

# The commands that tests start compile no module a second time, whatever the shell says about bytecode.
test test-all test-matrix test-costs soak: export PYTHONDONTWRITEBYTECODE :=

# CASES mutated files of every kind and SCHEMAS schemas, decided by SEED: what reading the ones comes to, and whether the
# others allow what the jsonschema package accepts.
fuzz: $(VENV)/installed-test
	$(BIN)/python tests/support/fuzz_files.py --cases $(CASES) --seed $(SEED)
	DECODERY_SCHEMAS=$(SCHEMAS) $(BIN)/python -m pytest tests/unit/constraints/test_schema_fuzz.py

lint: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/method_index.py --check
	$(BIN)/python tools/training_index.py --check

bench: $(VENV)/installed
	$(BIN)/decodery bench --out $(OUT) $(if $(wildcard $(DATA)),--data $(DATA))

# What the GPU path computes and how fast, in ten minutes: with .venv where it is there, else with PYTHON, so that it
# runs on a bare machine without a network (docs/gpu.md). ARGS: its options, such as --device cpu --size tiny.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu/run.py $(ARGS)

# All tables of searches on puzzles, into benchmarks/results. What they have to train first is kept in WORK, so that the
# same command goes on where it stopped: hours.
searches: $(VENV)/installed-benchmarks
	for script in search_tables search_trained search_models; do $(BIN)/python benchmarks/$$script.py --work $(WORK) || exit 1; done

# The generated parts of the pages, and the site made of them, in site/.
docs: $(VENV)/installed-docs
	$(BIN)/python tools/docs/generate.py
	$(BIN)/python tools/docs/site.py

# The source package and the wheel of this kind of machine, in dist/; the wheel is tried in a bare environment, whose
# packages and licences dist/decodery.cdx.json lists.
wheel: $(VENV)/installed-package
	rm -rf build dist
	$(BIN)/python -m build --outdir dist/made
	PATH=$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir dist dist/made/*.whl
	mv dist/made/*.tar.gz dist && rm -r dist/made
	$(BIN)/python packaging/try_wheel.py dist/*.whl --sbom dist/decodery.cdx.json $(if $(CONSTRAINTS),--torch "$$(grep '^torch==' $(CONSTRAINTS))")

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "decodery needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# The native library is built beside the packages where make may do two things at once (make -j2).
$(VENV)/installed: $(VENV)/packages $(VENV)/built
	@touch $@

$(VENV)/installed-%: $(VENV)/packages-% $(VENV)/built
	@touch $@

$(VENV)/built: pyproject.toml setup.py $(wildcard src/decodery/core/native/csrc/*) | $(BIN)/python
	@$(PIP) --no-deps -e .
	@touch $@

$(VENV)/packages: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing decodery into $(VENV) (torch is the large part) ..."
	@$(if $(GPU),,$(if $(TORCH_INDEX),$(CPU_TORCH)))
	@$(BIN)/python packaging/requirements.py > $@.txt
	@$(PIP) -r $@.txt
	@touch $@

EXTRAS_test := test lint
EXTRAS_docs := docs benchmarks

.SECONDARY:
$(VENV)/packages-%: $(VENV)/packages
	@$(BIN)/python packaging/requirements.py $(or $(EXTRAS_$*),$*) > $@.txt
	@$(PIP) -r $@.txt
	@touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info
