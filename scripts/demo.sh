#!/bin/sh
# The main job from nothing: plan, train, report. Called by `make demo`, which makes .venv first.
set -eu
name=demo-$(date +%Y%m%d-%H%M%S)
set -- SmolLM2-135M-Instruct stdlib-docstrings method=lora train.max_length=512 train.too_long=drop \
    train.steps=18 train.learning_rate=1e-3 train.warmup_steps=2 train.eval_every=0 train.save_every=10 "name=$name" "$@"
.venv/bin/finefit plan "$@"
.venv/bin/finefit train "$@"
.venv/bin/finefit report "runs/$name"
