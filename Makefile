# The two commands of the README, and the rest.  Each sets up .venv first; that is free when it is done.
.PHONY: demo train test packages setup setup-sglang check fast-test fix clean

ENGINE ?= vllm
# SGLang has an environment of its own.
SETUP_sglang = setup-sglang

demo: setup $(SETUP_$(ENGINE))  ## The example under the baseline and under each technique; ENGINE=sglang: on SGLang.
	.venv/bin/seer compare examples/tiny_reasoner/demo.toml --set seer.engine=$(ENGINE)

train: setup $(SETUP_$(ENGINE))  ## Train the example's model by GRPO on its own rollouts; goes on where it was stopped.
	.venv/bin/seer train examples/tiny_rl/train.toml --out out/tiny_rl --resume --set seer.engine=$(ENGINE)

test: packages setup-sglang fast-test  ## Everything CI runs: style, types, import contracts, all tests.
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

setup-sglang: setup  ## The environment of SGLang's workers, .venv-sglang, for machines without a GPU.
	@scripts/setup-sglang

clean:
	rm -rf .venv .venv-sglang build out
