# The two commands of the README, and the rest.  Each sets up .venv first; that is free when it is done.
.PHONY: demo train test packages setup setup-sglang setup-verl check fast-test verl-test fix clean

ENGINE ?= vllm
# SGLang has an environment of its own.
SETUP_sglang = setup-sglang

demo: setup $(SETUP_$(ENGINE))  ## The example under the baseline and under each technique; ENGINE=sglang: on SGLang.
	.venv/bin/seer compare examples/tiny_reasoner/demo.toml --set seer.engine=$(ENGINE)

train: setup $(SETUP_$(ENGINE))  ## Train the example's model by GRPO on its own rollouts; goes on where it was stopped.
	.venv/bin/seer train examples/tiny_rl/train.toml --out out/tiny_rl --resume --set seer.engine=$(ENGINE)

test: packages setup-sglang fast-test verl-test  ## Everything CI runs: style, types, import contracts, all tests.
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

verl-test: setup-verl  ## The adapter for verl: with verl's own classes, in verl's environment, on a server in Seer's.
	cd adapters/verl && ../../.venv-verl/bin/python -m pytest

fix: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

setup:
	@scripts/setup

setup-sglang: setup  ## The environment of SGLang's workers, .venv-sglang, for machines without a GPU.
	@scripts/setup-sglang

setup-verl: setup  ## An environment of verl's, .venv-verl, for machines without a GPU.
	@scripts/setup-verl

clean:
	rm -rf .venv .venv-sglang .venv-verl build out
