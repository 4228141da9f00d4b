PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= all

python = $(VENV)/bin/python
environment = $(PYTHON) packaging/environment.py --venv "$(VENV)" --extras

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make the environment in .venv (EXTRAS=all, or a list such as EXTRAS=plot,test)
	@$(environment) "$(EXTRAS)"

demo: ## install what the demo needs, and run it
	@$(environment) demo,plot
	$(python) -m tangent_lens demo

test: lint ## lint, check types and run the tests
	$(python) -m pytest

lint: ## check style, formatting and types
	@$(environment) test
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m pyright --pythonpath $(python)

format: ## repair style and formatting
	@$(environment) test
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

bench: ## measure recording and isotropy against the alternatives
	@$(environment) bench
	$(python) benchmarks/recording.py
	$(python) benchmarks/isotropy.py

build: ## build the wheel and the source archive into dist/
	@$(environment) test
	$(python) -m build

clean: ## delete the environment, the caches and what was built
	rm -rf "$(VENV)" build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
