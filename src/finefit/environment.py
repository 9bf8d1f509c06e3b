"""What must stand in a process's environment before its libraries load."""

import os
import sys

from . import keeper

# Read once, when a process starts. Idle OpenMP threads spin for a moment, then sleep: spinning on costs 8 ms an operator
# on a busy machine, sleeping at once costs a tenth of a step on an idle one (2 cores, torch 2.13, 2026-11-29).
STEADY = {
    "GOMP_SPINCOUNT": "2000",
    # Packed rows have ever new lengths; oneDNN would keep a compiled kernel with its buffers for each of the last 1,024
    # shapes: 400 MB more after 8 steps of the 135M model. A block of it, forward and backward, uses about fifty.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def steady_environment() -> None:
    """Start this process again with the settings that must be there before its libraries load, unless they are."""
    if _missing() and not os.environ.get("FINEFIT_RESTARTED"):
        _restart("finefit")


def kept_process() -> None:
    """The same, as a child of a keeper where the system counts the processes it kills."""
    if sys.platform != "linux" or "RANK" in os.environ:  # torch's launcher keeps its own
        steady_environment()
    elif keeper.TELL_TO not in os.environ:
        _restart("finefit.keeper")


def _missing() -> dict[str, str]:
    return {key: value for key, value in STEADY.items() if key not in os.environ}


def _restart(module: str) -> None:
    os.environ.update(_missing(), FINEFIT_RESTARTED="1")
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *sys.argv[1:]])
