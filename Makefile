# The two commands of the README are `make demo` and `make test`. Each sets up all it needs; a stamp
# in .build/ marks what is done, so the second call starts at once.

PYTHON ?= python3
VENV   := $(CURDIR)/.venv
STAMPS := .build
BIN    := $(VENV)/bin

# What the calling shell may carry and what would mix another environment into ours; and without
# bytecode files every import of torch takes eight seconds instead of two.
unexport CARGO_TARGET_DIR PYTHONPATH PYTHONHOME CONDA_PREFIX PYTHONDONTWRITEBYTECODE
export VIRTUAL_ENV := $(VENV)
export UV_CONSTRAINT := $(CURDIR)/constraints.txt
export PATH := $(BIN):$(PATH)

RUST   := Cargo.toml Cargo.lock .cargo/config.toml $(shell find crates -name '*.rs' -o -name Cargo.toml 2>/dev/null)
UV     := $(BIN)/uv pip install --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo test loom tsan miri lines fuzz soak-net soak-embedding build-rust test-rust test-python test-tensorflow lint \
        lint-rust lint-python format docs wheel image clean preflight \
        constraints upstream-horovod matrix wild twins outputs ten-minutes site

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

preflight:
	@$(PYTHON) scripts/preflight.py

$(STAMPS)/venv: constraints.txt | preflight
	@mkdir -p $(STAMPS)
	@scripts/venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

# PINS: other versions than ours, as `make test-python PINS="torch==2.9.1 torchvision==0.24.1"` in a
# fresh clone. (.github/workflows/check.yml)
$(STAMPS)/deps: $(STAMPS)/venv pyproject.toml
	@echo "installing torch and the rest (5 GB the first time)"
	@$(BIN)/python scripts/requirements.py dev build > $(STAMPS)/requirements.txt
	@$(UV) -r $(STAMPS)/requirements.txt
	@test -z "$(PINS)" || env -u UV_CONSTRAINT $(UV) $(PINS)
	@touch $@

$(STAMPS)/native: $(STAMPS)/deps $(RUST)
	@echo "building the native module"
	@$(BIN)/maturin develop --quiet --release --locked --uv
	@touch $@

# No package of Python is needed for it: `setup` builds it while they are fetched. As maturin builds the
# native module: as a library for C alone, so that the crates of both are compiled once.
$(STAMPS)/plugin: $(RUST) | preflight
	@echo "building the NCCL plug-in and TensorFlow's ops"
	@mkdir -p $(STAMPS)
	@cargo rustc --quiet --release --locked -p evener-nccl --lib --crate-type cdylib
	@cargo rustc --quiet --release --locked -p evener-tensorflow --lib --crate-type cdylib
	@mkdir -p python/evener/lib
	@cp target/release/libnccl_net_evener.so python/evener/lib/.part.so
	@mv python/evener/lib/.part.so python/evener/lib/libnccl-net-evener.so
	@cp target/release/libtensorflow_evener.so python/evener/lib/.part.so
	@mv python/evener/lib/.part.so python/evener/lib/libevener-tensorflow.so
	@touch $@

setup: ## everything that demo and test need
	@$(MAKE) --no-print-directory -j2 $(STAMPS)/native $(STAMPS)/plugin

# 6.4 MB of gradients over 300 Mb/s: on two cores the network costs what it costs VGG16 on fast GPUs
# over 25 Gb/s. docs/benchmarks/demo.md has the arithmetic.
DEMO_NET := --sizes 65536 --seconds 1 --repeats 3
demo: setup ## train on a simulated two-node cluster, show what the network costs
	@$(BIN)/evener bench train --model vgg-tiny --batch-size 32 --lab 2x2@300mbit \
		--columns ddp,horovod,exact,fp16,topk --seconds 1.5 --warmup 2 \
		--json demo/results.json --html demo/index.html
	@echo; echo "The network alone: one TCP stream per communicator, as NCCL has by default, beside Evener."
	@echo "Each flow capped at a fifth of the link, as clouds do it:"
	@$(BIN)/evener bench net --lab 2x1@200mbit,cap=40mbit,queue=20ms $(DEMO_NET) --json demo/net-flow-cap.json
	@echo "Four equal paths behind two routers, which nobody can see:"
	@$(BIN)/evener bench net --lab 2x1@200mbit,paths=4,queue=20ms $(DEMO_NET) --json demo/net-four-paths.json

# What wants a compiler alone is done while torch is fetched. Cargo has its own count of jobs.
CARGO := env -u MAKEFLAGS -u MFLAGS cargo
test: ## all checks and tests that need no GPU
	@$(MAKE) --no-print-directory --output-sync=recurse -j4 $(STAMPS)/native $(STAMPS)/plugin lint-rust build-rust
	@$(MAKE) --no-print-directory --output-sync=recurse -j2 lint-python test-rust
	@$(MAKE) --no-print-directory test-python

# Examples are compiled by clippy alone: building those of the packet protocol takes 27 s of a core.
build-rust: $(STAMPS)/venv
	$(CARGO) test --no-run --quiet --workspace --locked --lib --bins --tests

test-rust: $(STAMPS)/deps
	$(CARGO) test --quiet --workspace --locked --lib --bins --tests
	$(CARGO) test --quiet --workspace --locked --doc

loom: $(STAMPS)/deps ## every interleaving of the engine's rings and of an embedding that grows
	RUSTFLAGS="--cfg loom" cargo test --quiet --release --locked -p evener-engine --lib --target-dir target/loom loom
	RUSTFLAGS="--cfg loom" cargo test --quiet --release --locked -p evener-embedding --lib --target-dir target/loom loom

tsan: $(STAMPS)/deps ## the engine's and the embedding store's tests under ThreadSanitizer (nightly Rust; several minutes)
	$(BIN)/python scripts/tsan.py

lines: $(STAMPS)/deps ## cache lines that two instances of the packet engine share (nightly Rust): none on the data path
	$(BIN)/python scripts/lines.py

# With rayon's crossbeam-epoch no pool of threads keeps to Stacked Borrows, so the store's tests run by
# Tree Borrows.
miri: $(STAMPS)/deps ## the engine's rings and parsers and the embedding store under Miri (nightly Rust)
	@cargo +nightly miri --version >/dev/null 2>&1 || { echo "skipped: cargo +nightly miri does not run here"; \
		echo "  fix: rustup toolchain install nightly --component rust-src,miri"; exit 0; }; \
	MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=4 cargo +nightly miri test --locked \
		--target-dir target/miri -p evener-engine --lib && \
	MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-tree-borrows" cargo +nightly miri test --locked \
		--target-dir target/miri -p evener-embedding --lib

fuzz: ## libFuzzer on what hears packets (nightly Rust): make fuzz SECONDS=60, for each of three targets
	scripts/fuzz.sh $(or $(SECONDS),60) $(TARGETS)

soak-net: $(STAMPS)/native $(STAMPS)/plugin ## 3.6 million messages through the plug-in, a fault every second
	$(BIN)/python benchmarks/net_soak.py

soak-embedding: ## 8 threads insert, step, look up, evict and save for 10 minutes against a model
	EVENER_SOAK_SECONDS=$${EVENER_SOAK_SECONDS:-600} cargo test --locked -p evener-embedding --test snapshot \
		--config profile.dev.package.evener-embedding.opt-level=2 threads_that_insert -- --nocapture

test-python: $(STAMPS)/native $(STAMPS)/plugin
	scripts/test_python.sh

matrix: $(STAMPS)/native ## a bounded list of tests with other versions of torch and Python: make matrix ARGS="--torch 2.9,2.15"
	$(BIN)/python scripts/matrix.py $(ARGS)

test-tensorflow: $(STAMPS)/native $(STAMPS)/plugin
	$(BIN)/python -m pytest $$(grep -rl --include='test_*.py' tensorflow tests | grep -v '^tests/wild')

wild: $(STAMPS)/native ## programs of others, plain and under Evener: make wild ARGS="--only trainer"
	$(BIN)/python -m tests.wild $(ARGS)
	@test -n "$(ARGS)" || $(BIN)/python -m tests.wild.embedding_models
	@test -n "$(ARGS)" || $(BIN)/python -m tests.wild.recommenders

twins: $(STAMPS)/native ## random programs by Evener and by the plain reference: make twins SEEDS=1000 HOURS=8
	$(BIN)/python -m tests.twins $(PILLAR) $(if $(SEEDS),--seeds $(SEEDS)) --hours $(or $(HOURS),0)

# What some of upstream's tests import. Those of Ray want an older one, and say so.
$(STAMPS)/upstream: $(STAMPS)/native
	@$(UV) mock parameterized psutil
	@touch $@

# DIR is the user's own checkout of github.com/horovod/horovod; ARGS: see --help.
upstream-horovod: $(STAMPS)/upstream ## upstream Horovod's own tests: make upstream-horovod DIR=CHECKOUT
	@test -n "$(DIR)" || { echo "error: DIR is not set"; echo "  fix: make upstream-horovod DIR=checkout-of-horovod"; exit 2; }
	$(BIN)/python scripts/upstream_horovod.py $(DIR) $(ARGS)

# Fuzz targets are no members of the workspace. A check links nothing, so libFuzzer's own C++ is left out
# and stable Rust is enough.
FUZZ := RUSTFLAGS="--cfg fuzzing" CUSTOM_LIBFUZZER_PATH=/dev/null
lint: lint-rust lint-python

lint-rust: $(STAMPS)/venv
	cargo fmt --all --check
	$(CARGO) clippy --quiet --workspace --all-targets --locked -- -D warnings
	$(FUZZ) $(CARGO) clippy --quiet --target-dir target/fuzz/check --manifest-path crates/fuzz/Cargo.toml -- -D warnings

lint-python: $(STAMPS)/native
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python scripts/docs.py --check
	$(BIN)/python scripts/check_imports.py
	$(BIN)/python scripts/check_modules.py

format: $(STAMPS)/deps ## rustfmt and ruff
	cargo fmt --all
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(STAMPS)/native ## write the pages that are made from the code
	$(BIN)/python scripts/docs.py

SITE := $(CURDIR)/$(STAMPS)/site-env
$(STAMPS)/site-deps: pyproject.toml | preflight
	@mkdir -p $(STAMPS)
	@scripts/venv.sh "$(PYTHON)" "$(SITE)"
	@$(SITE)/bin/python scripts/requirements.py --only site > $(STAMPS)/site.txt
	@env -u UV_CONSTRAINT VIRTUAL_ENV=$(SITE) $(SITE)/bin/uv pip install --quiet -r $(STAMPS)/site.txt
	@touch $@

site: $(STAMPS)/site-deps ## the pages as a site, .build/site/index.html, every link checked: make site ARGS=--serve
	@$(SITE)/bin/python scripts/site.py $(ARGS)

ten-minutes: $(STAMPS)/deps ## the pages of the first ten minutes, on dist/*.whl in an empty environment
	$(BIN)/python scripts/ten_minutes.py $(ARGS)

outputs: $(STAMPS)/native ## run the commands whose output a page shows, and write it there
	$(BIN)/python -m tests.guide.outputs

# What builds a wheel, in an environment of its own: a small part of what development needs.
WHEEL := $(CURDIR)/$(STAMPS)/wheel
$(STAMPS)/wheel-deps: constraints.txt pyproject.toml | preflight
	@mkdir -p $(STAMPS)
	@scripts/venv.sh "$(PYTHON)" "$(WHEEL)"
	@$(WHEEL)/bin/python scripts/requirements.py --only build > $(STAMPS)/wheel.txt
	@VIRTUAL_ENV=$(WHEEL) $(WHEEL)/bin/uv pip install -r $(STAMPS)/wheel.txt
	@touch $@

wheel: $(STAMPS)/wheel-deps ## dist/*.whl, checked: glibc 2.28, all parts in it, works where there is no cargo
	@VIRTUAL_ENV=$(WHEEL) PATH="$(WHEEL)/bin:$$PATH" scripts/wheel.sh

image: wheel ## dist/evener-image.tar: an OCI image with Debian, Open MPI, sshd and the wheel
	scripts/image.sh

constraints: $(STAMPS)/venv ## pin the newest versions that fit
	$(BIN)/python scripts/requirements.py dev build | $(BIN)/uv pip compile --quiet --universal --python-version 3.10 \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links --upgrade -o constraints.txt -
	@! grep -n '://' constraints.txt

clean: ## forget the environment and all that was built
	rm -rf $(VENV) $(STAMPS) target dist demo
