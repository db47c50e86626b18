# Everything runs in .venv, which the first target that needs it makes. A .venv that is already
# there is taken as it is, with whatever torch it holds.
#
#   PYTHON=python3.12        the interpreter that .venv is made with (3.11 or newer)
#   TORCH=torch==2.11.0      the torch to install, as pip understands it
#   ARGS="..."               passed on to the program: make demo ARGS="--epochs 5"
#   SYSTEM=1                 no .venv: $(PYTHON) and the packages at hand. Nothing is installed and
#                            no network used; the native libraries are built beside the sources

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
VENV := .venv

sources := pyproject.toml setup.py CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)

ifdef SYSTEM
python := $(PYTHON)
build := $(python) setup.py --quiet build_ext --inplace egg_info
soabi := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')
installed := build/.installed-$(soabi)
dev_installed := $(installed)
# Makes the package and its entry points visible to programs that lie in other folders.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
python := $(VENV)/bin/python
build := $(python) -m pip install --quiet --no-deps --editable .
installed := $(VENV)/.installed
dev_installed := $(VENV)/.installed-dev
# A torch asked for on the command line or in the environment, and not the one asked for last time.
ifneq ($(origin TORCH),file)
ifneq ($(shell cat $(VENV)/.torch 2>/dev/null),$(TORCH))
.PHONY: $(VENV)/.torch
endif
endif
endif

.PHONY: help install demo test lint cuda bench gpu clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*##/\1\t/p' $(MAKEFILE_LIST) | expand -t 10

install: $(installed)  ## make .venv with torch and this package

demo: $(installed)  ## train a small vision transformer; table and loss curves in demo-out/
	$(python) examples/train_digits.py $(ARGS)

test: $(installed)  ## run the tests
	$(python) -m pytest $(ARGS)

lint: $(dev_installed)  ## check style and types
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy

cuda: $(installed)  ## compile the CUDA library; needs nvcc, but neither a GPU nor torch with CUDA
	FORCE_CUDA=1 $(build)

bench: $(installed)  ## run a benchmark: make bench ARGS="compile --help"
	$(python) -m benchmarks $(or $(ARGS),compile)

# It builds within its own time where nothing has to be installed first.
gpu: $(if $(SYSTEM),,$(installed))  ## on a machine with a GPU: build, tests, demo and benchmarks; results in gpu-out/
	$(python) -m benchmarks gpu $(ARGS)

clean:  ## remove everything that was built, but not .venv
	rm -rf build dist demo-out gpu-out *.egg-info autocast_backend/*.so $(VENV)/.installed*
	rm -rf .pytest_cache .mypy_cache .ruff_cache

ifdef SYSTEM

$(installed): $(sources)
	$(build)
	@mkdir -p $(@D) && touch $@

else

define check_python
import sys
if sys.version_info < (3, 11):
    sys.exit("$(PYTHON) is Python %d.%d; 3.11 or newer is needed: make PYTHON=python3.12" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("$(PYTHON) has no venv module (Debian: apt install python3-venv); or use what is installed: make SYSTEM=1")
endef
export check_python

$(python):
	@command -v "$(PYTHON)" >/dev/null || { echo "no program $(PYTHON); name a Python >= 3.11: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c "$$check_python"
	$(PYTHON) -m venv $(VENV)

# torch comes before the package, whose build needs its headers, and no later install may change it.
$(VENV)/.torch: | $(python)
	@if [ $(origin TORCH) != file ] || ! $(python) -c 'import torch' 2>/dev/null; \
	then set -x; $(python) -m pip install '$(TORCH)'; fi
	@echo '$(TORCH)' > $@

$(installed): $(sources) $(VENV)/.torch
	$(python) -m pip install \
	  "$$($(python) -c 'from importlib.metadata import version; print("torch==" + version("torch"))')" \
	  --editable '.[demo,test]'
	@touch $@

# The package is there already: this installs what its extra asks for, and builds nothing.
$(dev_installed): $(installed)
	$(python) -m pip install 'smart_autocast[dev]'
	@touch $@

endif
