# The three commands of the README, and what `make test` leaves to `make test-all`. `make install` builds .venv once; afterwards it is a no-op until
# settings.ini, setup.py or constraints.txt change.
#   TORCH=cpu     take torch from PyTorch's index of CPU wheels (otherwise from pip's own sources)
#   PYTHON=...    the interpreter the environment is made from (3.11 or newer)
#   ADAPTER=lora  the adapter that `make continual25` and `make small` train
#   WORKERS=2     processes that `make test` and `make test-all` use
#   WITHOUT=log   notebooks that they leave out, as paths under nbs without .ipynb: what something else has run already
PYTHON  ?= python3
VENV    ?= .venv
TORCH   ?=
ADAPTER ?= himalaya
WORKERS ?= 2
WITHOUT ?=

# notebooks whose saved tables CI compares; three share a process, so that the longest stand apart
PAGES := index 96a_configurations 98_ecosystem 94_results 97_costs 98a_latency 96_run_files 97a_scale log 94b_overview 93_claims 89a_contributing 94c_real_model 93a_energy_claims 89b_internals 94a_energy_results 96b_python study/23_aims 89_support workshop/12_equations workshop/13_structure
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ifeq ($(TORCH),cpu)
TORCH_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
endif

SUITE := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m himalaya_hest.workshop.suite --workers $(WORKERS) $(if $(WITHOUT),--without $(WITHOUT))

.PHONY: install continual25 small test test-all test-rest test-reverse readme prepare docs clean
install: $(STAMP)

$(STAMP): settings.ini setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make install PYTHON=python3.11" >&2; exit 1; }
	@echo "setting up $(VENV): about 2 GB, a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH_INDEX) torch
	@$(PIP) $(TORCH_INDEX) -e '.[dev]'
	@$(BIN)/python -m pip check
	@touch $@

continual25: install
	@mkdir -p runs
	$(BIN)/papermill --log-output nbs/90_continual25.ipynb runs/continual25.ipynb -p adapter $(ADAPTER)

# real tasks on a model of 135 million parameters: DATA is the folder of their rows, MODEL another place of the backbone (a folder, a GGUF file)
small: install
	@mkdir -p runs
	$(BIN)/papermill --log-output nbs/90_continual25.ipynb runs/small.ipynb -p scale small -p adapter $(ADAPTER) $(if $(MODEL),-p model $(MODEL)) $(if $(DATA),-p source local -p data_dir $(DATA))

# the first tier: without cells flagged `full` or `slow` and the notebooks named in SECOND (nbs/workshop/18_suite.ipynb);
# five minutes on two cores is the aim
test: install
	$(SUITE)

# both tiers; test-rest: the notebooks that the first tier leaves out, in whole or in part. No tier runs papermill's targets
test-all: install
	$(SUITE) --all
test-rest: install
	$(SUITE) --rest

# one process, last notebook first: shows state that a notebook leaves behind
test-reverse: install
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -c "import sys; from pathlib import Path; from nbdev.test import test_nb; sys.exit(not all([\
	  test_nb(p.absolute(), skip_flags=['slow', 'gpu', 'network', 'full'], do_print=True)[0] for p in sorted(Path('nbs').rglob('*.ipynb'), reverse=True)]))"

readme: install
	$(BIN)/jupyter nbconvert --log-level WARN --to notebook --execute --inplace $(PAGES:%=nbs/%.ipynb)
	$(BIN)/nbdev_clean
	$(BIN)/python -m himalaya_hest.workshop.readme

prepare: install
	$(BIN)/nbdev_export
	@$(MAKE) readme

# nbdev installs what it misses: without Quarto on the PATH it would fetch one and call the first pip that it finds, so it is asked for before.
# README.md has a maker of its own, and nbdev renders it only where it is the older file
docs:
	@command -v quarto >/dev/null || { echo "make docs: Quarto is not on the PATH; get it from https://quarto.org/docs/get-started, then run this again" >&2; exit 1; }
	@$(MAKE) install
	touch README.md
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/nbdev_docs

clean:
	rm -rf $(VENV) *.egg-info build dist _proc _docs
