# The two commands of the README, and the rest.  Each sets up .venv first; that is free when it is done.
.PHONY: demo test setup check fast-test fix clean

demo: setup  ## Roll out the example under the baseline and under each technique, on real vLLM engines.
	.venv/bin/seer compare examples/tiny_reasoner/demo.toml

test: check  ## Everything CI runs: style, types, import contracts, all tests.
	.venv/bin/python -m pytest

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

fast-test: setup  ## The tests that start no engine: seconds.
	.venv/bin/python -m pytest -m "not engine"

fix: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

setup:
	@scripts/setup

clean:
	rm -rf .venv build out
