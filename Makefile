# `make demo` and `make test` do all the set-up on a fresh machine; a second call does not reinstall.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test slow lint docs setup bench clean

demo: $(READY)
	$(BIN)/sordino demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

slow: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e '.[oracles]'
	OMP_NUM_THREADS=2 $(BIN)/pytest -m slow

lint: $(READY)
	$(BIN)/ruff check src papers bench tests examples tools docs/notebooks
	$(BIN)/ruff format --check src papers bench tests examples tools docs/notebooks
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict
	@echo "open site/index.html, or serve it with the search: $(BIN)/python -m http.server -d site"

setup: $(READY)

# torch goes first and alone: any looser spelling may pull gigabytes of CUDA packages onto a CPU machine.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,flower,onnx]'
	@touch $(READY)

bench: .venv-bench/.ready
	.venv-bench/bin/sordino bench --work W1,W2,W3,W3-large-stem,W4 --peers plain-channels-last,opacus,ghost,flower --json bench.json

.venv-bench/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install -q torch==2.13.0
	.venv-bench/bin/pip install -q -c constraints.txt -e '.[peers]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-bench build dist site
