PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= all
MATRIX ?= --only 2,3
NDIF ?= tests/integration

python = $(VENV)/bin/python
environment = $(PYTHON) packaging/environment.py --venv "$(VENV)" --extras
matrix = $(PYTHON) packaging/matrix.py $(MATRIX) --

# What has to hold beside every major version of TransformerLens; the rest of the tests needs the newest.
matrix_tests = tests/models/test_hooked_transformer.py tests/models/test_traps.py tests/models/test_rotary_base.py \
	tests/test_gotchas.py tests/test_interventions.py tests/conformance
cells = build/conformance

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-matrix test-ndif conformance lint format bench build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make the environment in .venv (EXTRAS=all, or a list such as EXTRAS=plot,test)
	@$(environment) "$(EXTRAS)"

demo: ## install what the demo needs, and run it
	@$(environment) demo,plot
	$(python) -m tangent_lens demo

test: lint ## lint, check types and run the tests
	$(python) -m pytest

test-matrix: ## run the backends' tests beside the newest TransformerLens 2 and 3 (MATRIX="--only 2,3 --fresh")
	$(matrix) python -m pytest $(matrix_tests)

test-ndif: ## run remote traces on a real NDIF server, which is started here without a GPU
	@$(environment) test
	@$(PYTHON) packaging/ndif.py
	$(python) -m pytest -m ndif $(NDIF)

conformance: ## compare every model family in every library with plain HuggingFace, beside every TransformerLens
	@$(environment) test
	@rm -rf $(cells) && mkdir -p $(cells)
	@status=0; \
	$(python) tests/conformance/run.py --json $(cells)/venv.json || status=1; \
	$(matrix) python tests/conformance/run.py --json "$(cells)/{major}.json" || status=1; \
	$(python) tests/conformance/run.py --show $(cells)/*.json || status=1; \
	exit $$status

lint: ## check style, formatting and types
	@$(environment) test
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m pyright --pythonpath $(python)

format: ## repair style and formatting
	@$(environment) test
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

bench: ## measure recording, isotropy, attention, controls, semi-NMF, sketches and geometry against the alternatives
	@$(environment) bench
	$(python) benchmarks/recording.py
	$(python) benchmarks/isotropy.py
	$(python) benchmarks/attention.py
	$(python) benchmarks/controls.py
	$(python) benchmarks/semi_nmf.py
	$(python) benchmarks/sketch.py
	$(python) benchmarks/remote_scaling.py
	$(python) benchmarks/geometry.py

build: ## build the wheel and the source archive into dist/
	@$(environment) test
	$(python) -m build

clean: ## delete the environment, the caches and what was built
	rm -rf "$(VENV)" build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
