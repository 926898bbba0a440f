# `make demo` and `make test` are all that a fresh machine needs: both make .venv and install into it.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3.14,$(if $(shell command -v $(p)),$(p))) python3.11)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The stamp has the seconds of the first installation, which `experiments.benchmarks.installation` reads.
# Quiet twice: errors only, for pip warns of every folder that its configuration names and that is not there.
INSTALL := $(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt
PYTEST_ARGS ?=
# Demos and tests are small models, which several threads of torch only slow down, above all beside other work.
export OMP_NUM_THREADS ?= 1
PAGE ?= docs/start.md
# Half of the suite by what it takes, with the tests that fork from one process.
HALF := tests/federation tests/trust tests/experiments tests/cli tests/kernels tests/plots tests/sites/rounds/test_processes.py \
	tests/test_conformance.py tests/test_layers.py

.PHONY: demo demo-statistics demo-gp demo-sites demo-vertical test suite test-slow test-browser test-zoo test-install test-matrix lint format docs page wheel bench bench-peers clean

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 to 3.14 is needed; name it with 'make PYTHON=/path/to/python …'"; exit 1; }
	test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) && date +%s >$(VENV)/.began; }
	$(INSTALL) torch
	$(INSTALL) --editable '.[dev]'
	@if test -e $(VENV)/.began; then echo $$(($$(date +%s) - $$(cat $(VENV)/.began))) >$@; rm $(VENV)/.began; else touch $@; fi

demo: $(STAMP)
	$(BIN)/python -m experiments.quickstart --out experiments/out

# The same in a minute for statisticians, and for people of Gaussian processes.
demo-statistics: $(STAMP)
	$(BIN)/python -m experiments.demo_statistics --out experiments/out

demo-gp: $(STAMP)
	$(BIN)/python -m experiments.fedmgp.extrapolation --out experiments/out

# A server and three sites as processes on this machine, enrolled on the spot.
demo-sites: $(STAMP)
	$(BIN)/python -m experiments.demo_sites

# Two companies and a registry as processes: train on columns of both, predict new customers, and see what leaks.
demo-vertical: $(STAMP)
	$(BIN)/python -m experiments.demo_vertical --out experiments/out

# Without PYTEST_ARGS two processes share the suite, a core each; what the first one prints comes at the end.
test: $(STAMP)
	@$(MAKE) --no-print-directory suite

# What `make test` runs, in the environment that BIN names.
suite:
ifeq ($(strip $(PYTEST_ARGS)),)
	@log=$$(mktemp); export PYTHONDONTWRITEBYTECODE=; \
	$(BIN)/python -m pytest $(HALF) >$$log 2>&1 & half=$$!; trap "kill $$half; cat $$log" INT TERM; \
	$(BIN)/python -m pytest tests fedtorch $(addprefix --ignore=,$(HALF)); rest=$$?; \
	wait $$half; half=$$?; cat $$log; rm $$log; exit $$((half + rest))
else
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 3600 $(PYTEST_ARGS)

# Reports in a headless Chromium; skipped where there is none (`apt-get install chromium`).
test-browser: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/report/test_browser.py $(PYTEST_ARGS)

# Projects of published packages in an environment of their own; `make test-zoo ZOO=newest` on the newest releases.
# torchaudio goes where it cannot be imported, beside a PyTorch for the CPU: transformers would fail with it.
ZOO ?= zoo
ZOO_PYTHON := .venv-zoo/$(ZOO)/bin/python
ZOO_INSTALL = $(ZOO_PYTHON) -m pip install --quiet --quiet --constraint constraints-$(ZOO).txt
.venv-zoo/$(ZOO)/.installed: pyproject.toml constraints-$(ZOO).txt tests/zoo/requirements.txt
	test -x $(ZOO_PYTHON) || $(PYTHON) -m venv .venv-zoo/$(ZOO)
	$(ZOO_INSTALL) torch
	$(ZOO_INSTALL) --editable '.[dev]' --requirement tests/zoo/requirements.txt
	$(ZOO_PYTHON) -c 'import torchaudio' 2>/dev/null || $(ZOO_PYTHON) -m pip uninstall --quiet --yes torchaudio
	@touch $@

test-zoo: .venv-zoo/$(ZOO)/.installed
	$(ZOO_PYTHON) -m pytest -m slow --timeout 3600 $(or $(PYTEST_ARGS),tests/zoo)

# Wheel and sdist into an empty environment, without constraints. PyTorch is the release of the constraints, which may be
# one for the CPU; `make test-install TORCH=torch` takes the newest, with gigabytes of CUDA libraries.
TORCH ?= $(filter torch==%,$(file <constraints.txt))
test-install: $(STAMP)
	$(INSTALL) build
	PYTHONPATH=tests $(BIN)/python -m support.installs --python "$$(command -v $(PYTHON))" --torch $(TORCH)

# The fast suite on several Pythons with the newest release of every dependency, in environments below .venv-matrix;
# `make test-matrix PYTHONS=/opt/python3.14/bin/python3 PYTEST_ARGS=tests/test_tree.py` a part of it on one.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
test-matrix:
	@$(PYTHON) tests/support/scripts/matrix.py --pythons "$(PYTHONS)" $(if $(filter file,$(origin PYTHONS)),,--asked-for) \
		--with "$(WITH)" --pytest-args "$(PYTEST_ARGS)"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Notebooks run while they are built; warnings are errors, and so is what a page says while a program is compiled.
docs: $(STAMP)
	$(INSTALL) --editable '.[docs]'
	$(BIN)/python -m fedtorch.programs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# The code cells of one page: make page PAGE=docs/start.md
page: $(STAMP)
	PYTHONPATH=. $(BIN)/python docs/_tools/run_page.py $(PAGE)

# The wheel that other machines install by `pip install dist/fedtorch-*.whl`.
wheel: $(STAMP)
	$(INSTALL) build
	$(BIN)/python -m build --wheel --outdir dist .

bench: $(STAMP)
	$(BIN)/python -m experiments.benchmarks.core

bench-peers: $(STAMP)
	$(BIN)/python -m experiments.benchmarks.peers

clean:
	rm -rf docs/_build docs/reference docs/results $(VENV) .venv-peers .venv-matrix .venv-zoo experiments/out .pytest_cache .mypy_cache .ruff_cache *.egg-info
