# Two commands do everything: `make quickstart` and `make test`. Both set up first; a second time they do not.
.DEFAULT_GOAL := help
.PHONY: help quickstart test setup lint format lock clean

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
CONTROLLER := .venv/controller/bin
CONSUMER := .venv/consumer/bin

help:            ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

quickstart: setup  ## set up, prepare the example's model, then train it end to end
	$(CONSUMER)/python examples/arithmetic/prepare.py
	$(CONTROLLER)/forebay run examples/quickstart.yaml --restart

test: setup      ## set up, check the code, then run every test in the environment it belongs to
	@$(PYTHON) tests/run.py $(STAGES)

setup:           ## make the three environments that the lock files name
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
	  echo "set-up failed: $(PYTHON) is not Python 3.11. On Debian 12: sudo apt-get install python3 python3-venv;" \
	    "or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m deploy.environments.create

lint: setup      ## check style, format and types
	@$(PYTHON) tests/run.py lint format types

format: setup    ## format the code and fix what can be fixed
	$(CONTROLLER)/ruff format .
	$(CONTROLLER)/ruff check --fix .

lock:            ## resolve deploy/environments/*.in anew and write the locks
	@$(PYTHON) -m deploy.environments.lock

clean:           ## remove the environments, caches and results (runs are kept)
	rm -rf .venv test-results build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
