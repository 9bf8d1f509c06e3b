#!/bin/sh
# The benchmark's job with finefit, alone on this machine: one result file. Called by `make bench`, which makes .venv.
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
.venv/bin/python benchmarks/demo_examples.py "$scratch/demo.jsonl"
model=$(.venv/bin/python -c 'from finefit.assets import model_folder; print(model_folder("SmolLM2-135M-Instruct").folder)')
.venv/bin/python benchmarks/finefit_run.py --model "$model" --data "$scratch/demo.jsonl" \
    --out "benchmarks/results/finefit-$(date +%Y-%m-%d).json" "$@"
