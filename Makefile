# `make demo` and `make test` set up a virtual environment first, and do it only once.
.PHONY: demo test check fuzz sanitize wheel native clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the tests start hundreds of processes, and each would compile all modules of mtrain
unexport PYTHONDONTWRITEBYTECODE

demo: native
	$(BIN)/mtrain demo runs/demo

test: native
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/ops/test_build.py

# the C with AddressSanitizer and UndefinedBehaviorSanitizer, at every vector width of this processor
sanitize: $(READY)
	$(BIN)/python tests/sanitize.py

# the hostile tests with 30 times as many cases, drawn anew, and five times as many kills
fuzz: native
	MTRAIN_FUZZ=30 $(BIN)/python -m pytest -q --tb=short -n auto --maxprocesses 4 tests/end_to_end/test_hostile.py tests/end_to_end/test_hostile_run.py tests/end_to_end/test_kills.py tests/augmentation/test_augment.py tests/serve

# the wheel in a fresh environment, far from here: the demo, its scores, pictures and exports
wheel:
	$(PYTHON) benchmarks/check_wheel.py

# the C, where it has changed since it was compiled; without a compiler the plain formulas are used
native: $(READY)
	-$(BIN)/python mtrain/ops/build.py

$(READY): pyproject.toml constraints.txt hatch_build.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) mtrain/ops/lib .pytest_cache .mypy_cache .ruff_cache
