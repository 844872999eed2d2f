# The two commands of the README, and the rest.  Each sets up .venv first; that is free when it is done.
.PHONY: demo test packages setup check fast-test fix clean

demo: setup  ## Roll out the example under the baseline and under each technique, on real vLLM engines.
	.venv/bin/seer compare examples/tiny_reasoner/demo.toml

test: packages fast-test  ## Everything CI runs: style, types, import contracts, all tests.
	.venv/bin/python -m pytest -m engine

packages:  ## The system libraries of the KV pool "mooncake", which pip cannot bring.
	@scripts/install-system-packages

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

fast-test: check  ## All but the tests that start real engines, on all cores: minutes.
	.venv/bin/python -m pytest -m "not engine" -n auto

fix: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

setup:
	@scripts/setup

clean:
	rm -rf .venv build out
