# make demo    trains on data/corpus.txt for at most two minutes and prints a sample
# make test    runs the tests that take less than seconds each, on all cores
# make test-bf16    runs those whose results can depend on the number format, with bf16 as the one that auto chooses
# make test-all    runs the others as well: slow tests, faults, other versions of Python, and the wheel with each extra
# make test-pythons    runs make test with each of PYTHONS, which uv finds or installs
# make test-gpu    runs the tests that need a CUDA device; make test-slow runs their code on the CPU
# make lint    runs ruff and mypy
# The tests of the report need Chromium, which make test installs with apt-get if it can; BROWSER=none leaves them out.
# make docs-check    runs the commands of the documents
# make wheel-smoke    installs a wheel into a clean environment and uses it; make wheel-check adds each extra
# All of them install into .venv first, with the versions of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo browser test test-bf16 test-slow test-faults test-gpu test-pythons test-all lint docs-check wheel-smoke wheel-check clean

demo: $(VENV)/installed
	$(BIN)/tinylm train data/corpus.txt --out checkpoints/demo --time 90s --force
	$(BIN)/tinylm sample --model checkpoints/demo --max-tokens 400 --seed 1

BROWSER ?= chromium
MARKS := $(if $(filter none,$(BROWSER)),-m 'not slow and not gpu and not faults and not browser')

browser:
	@tests/get_browser.sh $(BROWSER)

test: $(VENV)/installed-test browser
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(MARKS)

# Tests that compare numbers which were computed in the format that `auto` chose.
NUMBERS := machine run_report test_api.py models/test_open.py generation/test_chat_session.py $(patsubst %,commands/test_%.py,\
  adapters architectures chat_data distillation evaluate labels preferences train_resume)

test-bf16: $(VENV)/installed-test
	TINYLM_TEST_DTYPE=bf16 $(BIN)/python -m pytest --numprocesses auto --dist worksteal \
	  -m 'not slow and not gpu and not faults and not browser' $(addprefix tests/,$(NUMBERS))

test-slow: $(VENV)/installed-test
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m 'slow and not gpu'
	TINYLM_TEST_DEVICE=cpu $(BIN)/python -m pytest --numprocesses auto --dist worksteal -m gpu tests/test_gpu.py

test-gpu: $(VENV)/installed-test
	$(BIN)/python -m pytest -m gpu tests/test_gpu.py

test-faults: $(VENV)/installed-test
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m faults tests/faults

PYTHONS ?= 3.12 3.13 3.14

test-pythons:
	@command -v uv > /dev/null || { echo "test-pythons needs uv: pip install uv"; exit 1; }
	for version in $(PYTHONS); do \
	  uv python find --quiet --system $$version || uv python install $$version && \
	  $(MAKE) test VENV=.venv-$$version PYTHON="$$(uv python find --system $$version)" || exit; done

test-all: test test-slow test-faults test-pythons wheel-check

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs-check: $(VENV)/installed-docs
	$(BIN)/python docs/check.py

wheel-smoke:
	$(PYTHON) tests/check_wheel.py none

wheel-check:
	$(PYTHON) tests/check_wheel.py

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) install --quiet --constraint constraints.txt --editable ".[test,lint]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed-test
	$(PIP) install --quiet --constraint constraints.txt --editable ".[test,lint,bench]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
