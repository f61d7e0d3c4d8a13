# Everything goes through .venv, which the first target that needs it makes. Needs Python >= 3.11 and nothing else.
#   make demo PYTHON=/path/to/python3.12     picks the interpreter of a new .venv

REQUIRE := import sys; v = sys.version_info; v < (3, 11) and sys.exit("plait needs Python 3.11 or newer, \
%s is %d.%d: name a newer one, make PYTHON=/path/to/python3.11" % (sys.executable, v[0], v[1]))
NAMES := python3 python3.14 python3.13 python3.12 python3.11
RECENT = $(foreach name,$(NAMES),$(shell $(name) -c '$(REQUIRE)' 2>/dev/null && echo $(name)))
PYTHON ?= $(or $(firstword $(RECENT)),python3)
BIN := .venv/bin
STAMP := .venv/installed

# One thread per process: eight ranks share the machine.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test check format proof bench clean

help:
	@echo "make demo    train the built-in run on 8 local processes: tensor 2 x pipeline 2 x data 2"
	@echo "make test    the test suite, minutes"
	@echo "make check   format, lint, types, architecture"
	@echo "make proof   the long proofs, up to an hour"
	@echo "make bench   side by side with what a user would pick instead"
	@echo "make format  rewrite the source as 'make check' wants it"
	@echo "make clean   remove .venv and caches"

demo: $(STAMP)
	$(BIN)/plait train layout.tp=2 layout.pp=2 layout.dp=2 batch.micro_size=8 train.sample=240

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proof: $(STAMP)
	$(BIN)/python -m pytest -m proof

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# The stamp is written last: an interrupted installation starts again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(REQUIRE)'
	$(PYTHON) -m venv .venv
	@echo "installing into .venv, which takes minutes"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
