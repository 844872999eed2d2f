# The two commands of the README, and the rest.  Each sets up .venv first; that is free when it is done.
.PHONY: demo demo-cluster train test test-all gate types rest-test test-costs packages setup setup-core setup-sglang setup-verl setup-clients setup-next-vllm \
	setup-environments setup-docs \
	check style core-test fast-test engine-test long-test verl-test clients-test site site-test chromium prometheus bench-stale reference licences \
	wheels try-wheels fix clean

# Hundreds of processes import PyTorch and engines: bytecode is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE =

ENGINE ?= vllm
# SGLang has an environment of its own.
SETUP_sglang = setup-sglang

CORE_TESTS = tests/core host session trace $(foreach each,divided_rollout context_sched length_posterior baselines journal,plugins/$(each)) \
	contrib/rivals backends/sim --ignore backends/sim/tests/test_trace.py  # its runs draft by grouped_spec, which is compiled

demo: setup $(SETUP_$(ENGINE))  ## The example under the baseline and under each technique; ENGINE=sglang: on SGLang.
	.venv/bin/seer compare examples/tiny_reasoner/demo.toml --set seer.engine=$(ENGINE)

demo-cluster: setup  ## The example on four nodes of a Ray cluster here, one of them killed midway: all tokens compared.
	.venv/bin/python scripts/demo_cluster.py

train: setup $(SETUP_$(ENGINE))  ## Train the example's model by GRPO on its own rollouts; goes on where it was stopped.
	.venv/bin/seer train examples/tiny_rl/train.toml --out out/tiny_rl --resume --set seer.engine=$(ENGINE)

# ORDER=random shuffles test files and the tests in each; the output has the seed that repeats it (ORDER_SEED=...).
PYTEST = .venv/bin/python -m pytest --dist loadfile --second-run $(if $(ORDER),--order $(ORDER)) \
	$(if $(ORDER_SEED),--order-seed $(ORDER_SEED))

WORKERS ?= 3

test: packages  ## What a contributor runs before a pull request, and CI: style, types, and tests of every part.
	@scripts/setup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target style setup-sglang
	@$(MAKE) --no-print-directory --jobs=2 types gate
	@echo "make test-all runs the rest: what it is stands in tests/harness/rest.toml, with what covers it here."

test-all: packages prometheus chromium  ## All tests, in an hour: before a change of what only they show is finished.
	@scripts/setup-beside setup setup-sglang setup-verl setup-clients setup-environments setup-docs
	@$(MAKE) --no-print-directory check rest-test verl-test clients-test site-test try-wheels

rest-test: packages prometheus setup-sglang setup-environments setup-next-vllm
	$(PYTEST) -n $(WORKERS) --long

test-costs:  ## What each test file has cost in the last runs: seconds, and starts of engines.
	@.venv/bin/python scripts/test-costs

packages:  ## The system libraries of the KV pool "mooncake", which pip cannot bring.
	@scripts/install-system-packages

check: style types

style: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	PYTHONPATH=training/verl .venv/bin/lint-imports  # verl has an environment of its own
	.venv/bin/python scripts/check-words

types: setup
	.venv/bin/mypy

# WORKERS processes share the tests, one more than two cores have, since tests of engines wait a sixth of their time.
# types and gate run beside each other: nothing below takes part in make's jobs.
gate: setup-sglang
	env -u MAKEFLAGS -u MFLAGS $(PYTEST) -n $(WORKERS) --gate

fast-test: check  ## All but the tests that start real engines, on all cores: minutes.
	$(PYTEST) -m "not engine" -n auto --gate

core-test: setup-core  ## Core, simulator and techniques, without PyTorch or an engine.
	.venv-core/bin/python -m pytest -n auto -q $(CORE_TESTS)

engine-test: packages setup-sglang  ## The tests that start real engines, in two processes.
	$(PYTEST) -m engine -n 2 --gate

long-test: packages setup-sglang setup-next-vllm  ## The tests that cover on a larger scale what others cover.
	$(PYTEST) -m long --long -n 2

verl-test: setup-verl setup-sglang  ## The adapter for verl, with verl's own classes: over servers of verl's around a vLLM and a SGLang, and a server of Seer's.
	cd training/verl && ../../.venv-verl/bin/python -m pytest
	cd training/verl && PYTHONPATH=tests/beside_vllm ../../.venv/bin/python -m pytest tests/test_kept_vllm.py tests/test_own_images.py
	cd training/verl && PYTHONPATH=tests/beside_sglang ../../.venv-sglang/bin/python -m pytest tests/test_kept_sglang.py

clients-test: setup-clients setup-environments  ## Clients and environments of others, as they are, against a server on one vLLM: three minutes.
	cd tests/clients && ../../.venv-clients/bin/python -m pytest
	cd tests/clients && ../../.venv-verifiers/bin/python -m pytest test_verifiers.py

site: setup-docs  ## The documentation as a site that opens without a server: build/site/index.html.
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

site-test: chromium site setup  ## The site and reports in a browser: links, widths, accessibility, search, keyboard.
	cd docs_site && ../.venv-docs/bin/python -m pytest -n auto

chromium:  ## The browser of site-test, which pip cannot bring.
	@scripts/install-chromium

prometheus:  ## Prometheus and promtool in build/prometheus, for the tests of the plug-in prometheus.
	@scripts/install-prometheus

bench-stale: setup  ## Results in bench/results whose code has changed since they were measured.
	.venv/bin/python -m bench stale

reference: setup  ## The generated pages of docs/reference, from docstrings, settings and commands.
	.venv/bin/python -m reference

licences: setup  ## The licences of pins that have changed, looked up by pip; then the pages.
	.venv/bin/python -m reference.record_licences
	.venv/bin/python -m reference

wheels:  ## Wheels of all distributions in dist/, the draft index for each Python that is found.
	@scripts/build-wheels

try-wheels: wheels  ## These wheels in empty environments, one for each Python, away from the checkout.
	@scripts/try-wheels

fix: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

setup:
	@scripts/setup

setup-core:  ## The environment of core-test, .venv-core.
	@scripts/setup-core

setup-sglang: setup  ## The environment of SGLang's workers, .venv-sglang, for machines without a GPU.
	@scripts/setup-sglang

setup-next-vllm: setup  ## The next vLLM's Python files over the binaries of this one, in build/next-vllm, for tests.
	@scripts/setup-next-vllm

setup-docs:  ## The environment of site and site-test, .venv-docs.
	@scripts/setup-docs

setup-verl: setup  ## An environment of verl's, .venv-verl, for machines without a GPU.
	@scripts/setup-verl

setup-environments:  ## Environments of OpenEnv's and verifiers', .venv-openenv and .venv-verifiers, for tests.
	@scripts/setup-environments

setup-clients: setup  ## An environment with clients of OpenAI's API, .venv-clients.
	@scripts/setup-clients

clean:
	rm -rf .venv .venv-core .venv-sglang .venv-verl .venv-clients .venv-openenv .venv-verifiers .venv-docs build out
