# make install | demo | serve | test | check | docs | clean
#
# VLLM_TARGET_DEVICE=cuda builds the CUDA flavour; unset, make builds the CPU one, since demo and tests run on it.
# On the CPU, PyPI's torch brings gigabytes of CUDA libraries that nothing uses; with PyTorch's own CPU index in
# PIP_EXTRA_INDEX_URL, `make install` gets the small build.

PYTHON ?= python3
VENV ?= .venv
export VLLM_TARGET_DEVICE ?= cpu
# pip's hint to upgrade itself would stand between the lines that matter.
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN = $(VENV)/bin
STAMP = $(VENV)/.installed-$(VLLM_TARGET_DEVICE)
# A list of pyproject.toml as words for pip. Its place in the file: $(call listed,table,key).
listed = $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['$(1)']['$(2)'])")

.PHONY: install demo serve test check docs clean

# The series is applied every time: it takes half a second and does nothing where nothing changed.
install: $(STAMP)
	$(BIN)/python -m fork apply

# The wheels are fetched first because pip hides what a build prints, and 470 MB want a progress bar.
# Without build isolation: the environment has the build requirements by then.
$(STAMP): pyproject.toml upstream.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(call listed,build-system,requires) $(call listed,dependency-groups,test)
	$(BIN)/python -m fork fetch
	$(BIN)/python -m pip install --no-build-isolation --editable .
	rm -f $(VENV)/.installed-*
	touch $@

demo: install
	$(BIN)/python -m demo

serve: install
	$(BIN)/python -m demo --serve

# Engines and servers fill the machine and are watched by the clock, so those tests run one by one; most others run on all
# cores with a thread each, on two in 5 minutes instead of 8.
test: check
	$(BIN)/python -m ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not (e2e or alone)" --numprocesses auto --maxprocesses 4 --dist loadfile
	$(BIN)/python -m pytest -m "e2e or alone" --durations=15

check: install
	$(BIN)/python -m fork check

docs: install
	$(BIN)/python -m fork docs

clean:
	rm -rf build dist $(VENV)
