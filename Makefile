# make demo    trains on data/corpus.txt for at most two minutes and prints a sample
# make test    runs the tests      make lint    runs ruff and mypy
# All of them install into .venv first, with the versions of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint clean

demo: $(VENV)/installed
	$(BIN)/tinylm train data/corpus.txt --out checkpoints/demo --time 90s --force
	$(BIN)/tinylm sample --model checkpoints/demo --max-tokens 400 --seed 1

test: $(VENV)/installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) install --quiet --constraint constraints.txt --editable ".[test,lint]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
