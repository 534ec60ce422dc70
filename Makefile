# What people and CI call. Arguments for a command go in ARGS: make demo ARGS=--quick
SHELL := /bin/bash
BIN := .venv/bin
export PYTHON ?= python3.11
.DEFAULT_GOAL := help
.PHONY: help setup demo test check explore fuzz soak bench compat clients installation kvcached kernels lock clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

setup: ## bring .venv to what the lock says; nothing to do when it is current
	@deploy/lock/install

demo: setup ## production vLLM inside its SLO while an RL job uses its idle time
	$(BIN)/rosemux demo $(ARGS)

# The fast tests wait for half of their time, engines never.
test: setup ## the fast tests on four processes, then those that start a real vLLM on two
	$(BIN)/pytest -q -n 4 --dist loadfile -m "not engine" $(ARGS)
	$(BIN)/pytest -q -n 2 --dist loadfile -m engine $(ARGS)

check: setup ## format, lint, types, arrows between packages, names that must not be here
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/names
	.ci/budgets

explore: setup ## lease, permit and version protocols over all interleavings: make explore ARGS="lease --states 50000"
	$(BIN)/python -m tests.explore $(ARGS)

fuzz: setup ## requests made from each service's OpenAPI document: make fuzz ARGS="agent" takes one, ARGS=--quick a few requests of each
	$(BIN)/python -m tests.fuzz $(ARGS)

soak: setup ## real parts under load, a fault every 30 s, eight hours in pieces that go on: make soak ARGS="--minutes 10"
	$(BIN)/python -m tests.soak $(ARGS)

bench: setup ## one benchmark: make bench NAME=step_gate
	@test -n "$(NAME)" || { echo "make bench NAME=one of: $$(ls benchmarks/*/__main__.py | xargs -n1 dirname | xargs -n1 basename | xargs)"; exit 2; }
	mkdir -p out/bench
	$(BIN)/python -m benchmarks.$(NAME) --json out/bench/$(NAME).json $(ARGS)

compat: setup ## every upstream symbol that we touch, in each supported vLLM's wheel
	$(BIN)/python -m tests.compat build/wheels --download $(ARGS)

clients: setup ## unmodified clients of RL frameworks against the gateway: make clients ARGS="trl tinker" takes some
	$(BIN)/python -m tests.clients $(ARGS)

installation: setup ## the commands of docs/install.md and docs/operations.md, as root, on a node of its own under systemd; ARGS=--guest lends tokens too
	$(BIN)/python -m tests.install $(ARGS)

kvcached: setup ## the tests of shared KV over kvcached's own code, which needs no GPU for them
	deploy/kvcached/install
	PYTHONPATH=build/kvcached $(BIN)/pytest -q tests/contract/coserve/test_kv_shared.py $(ARGS)

kernels: setup ## the tests of our GPU kernels, interpreted on the CPU and compiled for a GPU that need not be there
	deploy/triton/install
	PYTHONPATH=build/triton $(BIN)/pytest -q tests/unit/weightsync/elements/test_device_hash.py $(ARGS)

lock: setup ## write requirements.lock again: make lock ARGS=--upgrade moves the versions
	deploy/lock/compile $(ARGS)

clean: ## remove what was built or written by runs, not .venv
	rm -rf out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
