# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PY := .venv/bin/python
STAMP := .venv/.installed
SEED ?= 1

.PHONY: demo test setup check test-slow up bench lock clean
.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): requirements.lock pyproject.toml
	bash scripts/setup.sh
	@touch $@

setup: $(STAMP) ## Make .venv (torch first, then the locked rest)

demo: $(STAMP) ## An agent learns a game while it plays; SEED=1, SEEDS="1 2 3" for several
	$(PY) -m examples.number_game.demo --seeds $(or $(SEEDS),$(SEED))

test: $(STAMP) ## All ordinary tests, with the minutes of each group
	$(PY) scripts/run_tests.py

test-slow: $(STAMP) ## The tests that take long
	$(PY) scripts/run_tests.py slow

check: $(STAMP) ## Formatting, lint, types, the arrows between the rooms
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy archon engine gateway workflows activities tests benchmarks examples scripts
	$(PY) -m pytest -q tests/test_arrows.py

up: $(STAMP) ## Start the whole stack here (archon up)
	.venv/bin/archon up

bench: $(STAMP) ## One benchmark: make bench NAME=loop_overhead
	$(PY) benchmarks/$(NAME).py

lock: $(STAMP) ## Write requirements.lock anew
	$(PY) -m pip -q install uv && bash scripts/lock.sh
