# Two commands on a fresh machine: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BENCH  := $(VENV)/.installed-bench
FOREIGN := $(VENV)/foreign
KERNELS := src/budgetformer/engine/kernels
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo demo-quick test test-slow fuzz test-foreign faults bench docs library native check lint format types audit clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,datasets,carbon,server,ray,spark,onnx,docs,dev]'
	touch $(STAMP)

# Compiles only where a source, a flag or the compiler changed. BUDGETFORMER_BUILD=0 skips it, =require fails without a compiler.
library: $(STAMP)
	@$(BIN)/python $(KERNELS)/build.py --as-set

native: $(STAMP)  ## compile the engine's kernels, or fail and say why
	@$(BIN)/python $(KERNELS)/build.py

demo: library  ## train a dense and a budgeted classifier on 77 intents of bank customers, and compare them
	HF_HUB_OFFLINE=1 $(BIN)/budgetformer train --data demo --target-budget 0.4 --output-dir runs/demo --overwrite
	@$(MAKE) --no-print-directory demo-answers RUN=runs/demo

demo-quick: library  ## the same on few rows, to see that all works
	HF_HUB_OFFLINE=1 $(BIN)/budgetformer train --data demo --target-budget 0.4 --quick --output-dir runs/demo-quick --overwrite
	@$(MAKE) --no-print-directory demo-answers RUN=runs/demo-quick

.PHONY: demo-answers
demo-answers:
	HF_HUB_OFFLINE=1 $(BIN)/budgetformer predict --model $(RUN) --top 3 "I lost my card, what now?" "Why was I charged twice for dinner?" "How do I change my PIN?"

test: library  ## the tests, minutes
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --jaxtyping-packages=budgetformer,beartype.beartype tests/test_estimators.py tests/test_router.py tests/test_attention.py tests/test_encoder.py

test-slow: library  ## the long tests too
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow

fuzz: library  ## whatever an adversary sends to the server, the answer is as its description says
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow tests/test_server_fuzz.py

# transformers' own tests come with its source package, not with its wheel.
$(FOREIGN)/.fetched: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[foreign]'
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary transformers --dest $(FOREIGN) \
		transformers==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("transformers"))')
	tar -xzf $(FOREIGN)/transformers-*.tar.gz -C $(FOREIGN)
	rm $(FOREIGN)/transformers-*.tar.gz
	touch $@

test-foreign: $(FOREIGN)/.fetched library  ## transformers' and PyTorch's own tests, on ours; the long way round
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow tests/foreign/torch_samples.py tests/foreign/transformers_suite.py

faults: library  ## plant faults in a copy, one by one: a test must notice each
	$(BIN)/python tests/faults/plant.py

$(BENCH): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $(BENCH)

bench: $(BENCH) library  ## our engine beside others on this machine
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/engine.py $(FLAGS)

docs: $(STAMP)  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/bandit -q -r src -c pyproject.toml

format: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror src/budgetformer/engine/kernels/*.cpp src/budgetformer/engine/kernels/*.hpp

types: $(STAMP)
	$(BIN)/pyright

# An index without such data answers like one without a hole. So it is asked first for a hole that is known, and every
# package must be found (--strict).
KNOWN := jinja2==3.1.5
HOLE  := CVE-2025-27516
PIP_AUDIT = $(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off $(FLAGS) -r /dev/stdin
audit: $(STAMP)  ## known holes in what we depend on, and habits in our own code that open some
	$(BIN)/bandit -q -r src -c pyproject.toml
	@echo $(KNOWN) | $(PIP_AUDIT) --format json 2>&1 | grep -q $(HOLE) || { echo "audit: NOT audited: the source of advisories cannot be reached, or has none: it does not tell $(HOLE) of $(KNOWN). Run this where pypi.org answers, or name another source: make audit FLAGS='-s osv'"; exit 1; }
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' | $(PIP_AUDIT)

check: lint format types test  ## what CI runs

clean:
	rm -rf $(VENV) runs build dist src/budgetformer/engine/_lib*
