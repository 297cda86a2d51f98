# `make run` shows what the project does; `make test` and `make check` are what a change has to pass.
# Needs Python >= 3.11 with pip and venv, and a C++20 compiler. Everything goes into .venv and build; models go into the
# user's cache.

PYTHON ?= python3
MODEL ?= smollm2-135m
PYTEST_ARGS ?=

JOBS ?= $(shell getconf _NPROCESSORS_ONLN)

MAKEFLAGS += --no-print-directory
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN_READY := .venv/.ready-run
DEV_READY := .venv/.ready-dev
NATIVE := $(shell find src/native -name '*.cpp' -o -name '*.h')
PACKAGE := pyproject.toml constraints.txt CMakeLists.txt $(NATIVE)

.DEFAULT_GOAL := help
.PHONY: help run test test-native test-sanitize test-arm check bench soak format clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

run: $(RUN_READY)  ## generate a text with and without speculation, and show what it saved
	@$(BIN)/outrider models fetch $(MODEL) >/dev/null
	@$(BIN)/outrider generate --model $(MODEL) --compare --prompt-file examples/summarize.txt

test: $(DEV_READY) test-native  ## run the whole test suite, C++ and Python
	@$(BIN)/outrider models fetch smollm2-135m >/dev/null
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-native: $(DEV_READY)  ## build and run the C++ tests alone
	$(BIN)/cmake -S . -B build/tests -DOUTRIDER_PYTHON=OFF -DOUTRIDER_TESTS=ON
	$(BIN)/cmake --build build/tests --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/tests --output-on-failure

test-sanitize: $(DEV_READY)  ## the same with AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/cmake -S . -B build/sanitize -DOUTRIDER_PYTHON=OFF -DOUTRIDER_TESTS=ON -DOUTRIDER_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure

test-arm: $(DEV_READY)  ## the same for AArch64, with a cross compiler (aarch64-linux-gnu-g++) and QEMU
	$(BIN)/cmake -S . -B build/aarch64 -DOUTRIDER_PYTHON=OFF -DOUTRIDER_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux \
		-DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
		"-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu"
	$(BIN)/cmake --build build/aarch64 --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/aarch64 --output-on-failure

check: $(DEV_READY)  ## ruff, clang-format, mypy --strict, and the tests of layout and docs
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest tests/unit/test_layout.py tests/unit/test_docs.py

bench: $(RUN_READY)  ## measure every method that needs no second model, on the prompts of the package
	$(BIN)/outrider bench $(MODEL) --limit 2

soak: $(RUN_READY)  ## five minutes of 16 clients: no request lost, no text changed, memory flat
	$(BIN)/python benchmarks/soak.py --model $(MODEL) --minutes 5

format: $(DEV_READY)  ## format the code, and mend what ruff can mend
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/clang-format -i $(NATIVE)

clean:  ## remove .venv and what tools left behind; models stay in the cache
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Outrider needs Python 3.11 or newer; set PYTHON")'
	$(PYTHON) -m venv .venv

$(RUN_READY): $(PACKAGE) | .venv/bin/python
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(DEV_READY): $(PACKAGE) | .venv/bin/python
	$(PIP) install --constraint constraints.txt --editable ".[dev]"
	@touch $(RUN_READY) $@
