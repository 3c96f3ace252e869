# make demo: installs into .venv and runs the main job on real data.
# make test: installs into .venv and runs every check.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(BIN)/python -m experiments.demo.demo

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf .venv runs
