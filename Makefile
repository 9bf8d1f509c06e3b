# make lists what there is. Every target starts from nothing: .venv is made or brought up to date first.
PYTHON ?= python3
BOOT = $(PYTHON) scripts/bootstrap.py
RUN = .venv/bin
# two processes, a file whole in one of them: what a file's tests share is made once
SPLIT = -n 2 --dist loadfile
export GOMP_SPINCOUNT ?= 0
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all test-faults test-distributed check grid bench clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## fine-tune SmolLM2-135M-Instruct on this machine, from nothing, and show what came out
	@$(BOOT) train
	@sh scripts/demo.sh

test: ## the tests, but those that others of their kind stand for
	@$(BOOT) train test
	$(RUN)/python -m pytest $(SPLIT)

test-all: ## every test (half an hour)
	@$(BOOT) train test
	$(RUN)/python -m pytest $(SPLIT) -m ""

test-faults: ## every fault at every moment: memory refused, killed, 20,000 generated inputs (half an hour)
	@$(BOOT) train test
	FINEFIT_GENERATED=2500 $(RUN)/python -m pytest $(SPLIT) -m "" tests/faults

test-distributed: ## all on 2 and 4 processes, DeepSpeed where it is installed; writes the table of what was tried (half an hour)
	@$(BOOT) train test
	FINEFIT_RANKS_TABLE=benchmarks/results/ranks.json $(RUN)/python -m pytest -m "" tests/distributed
	$(RUN)/python scripts/ranks_table.py

check: ## format, lint, types, import contract, size budget
	@$(BOOT) train test check
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports --no-logo
	$(RUN)/python scripts/torch_free.py
	$(RUN)/python scripts/budget.py

grid: ## predicted against simulated over all 160 combinations (minutes)
	@$(BOOT) train test
	FINEFIT_GRID=all $(RUN)/python -m pytest -m "" tests/memory/test_simulate.py

bench: ## measure finefit's own run on the benchmark's job (writes benchmarks/results)
	@$(BOOT) train test
	@sh scripts/bench.sh

clean: ## remove .venv and everything built or cached here; runs stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
