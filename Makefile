# `make demo` and `make test` do everything on a fresh machine: environment, install, run.
# One environment with two stamps: `.demo` is what the demo needs, `.dev` is what everything else needs on top.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test check bench soak format clean
setup: $(VENV)/.dev

$(VENV)/.demo: pyproject.toml constraints.txt CMakeLists.txt $(shell find native -type f)
	@scripts/setup demo $(PYTHON) $(VENV)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.demo
	@scripts/setup dev $(PYTHON) $(VENV)
	@touch $@

demo: $(VENV)/.demo
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo

test: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test

check: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

bench: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/bench

soak: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test --soak

format: setup
	$(BIN)/ruff format . && $(BIN)/ruff check --fix . && $(BIN)/clang-format -i $$(git ls-files 'native/*.h' 'native/*.cc')

clean:
	rm -rf $(VENV) build dist demo
