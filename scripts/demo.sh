#!/bin/sh
# The main job from nothing: plan, train, report. Called by `make demo`, which makes .venv first.
exec .venv/bin/finefit train SmolLM2-135M-Instruct stdlib-docstrings name=demo "$@"
