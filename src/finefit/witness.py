"""The simulated witness from outside: asks a process that has torch, and stays alive when that one does not. Torch-free.

A simulation patches its process and may abort it, so it runs in one of its own; a crash or a time-out is a note on the
answer, never the end of the planner. One process answers any number of questions.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Self

from .errors import EngineError
from .footprint import Footprint
from .foreign import ForeignRun

TIMEOUT_S = 120.0
# aten/src/ATen/cuda/CUDABlas.cpp: 8,320 KiB a thread that multiplies (forward's and backward's), 32 MiB from Hopper on.
_WORKSPACE, _HOPPER_WORKSPACE = 8320 * 1024, 32 * 2**20
_HOPPER = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200", "RTX 50", "RTX50", "RTX PRO")


@dataclass(frozen=True, slots=True)
class Simulated:
    """What one simulated run needs of its device, by reading."""

    footprint: Footprint
    allocated_bytes: int
    """Peak of tensors as the allocator counts them: rounded, library workspaces included."""
    reserved_bytes: int
    """Peak of what the caching allocator holds."""
    capacity_bytes: int
    """The smallest capacity in which the run goes through."""
    seconds: float
    notes: tuple[str, ...] = ()
    """What of the run the figures leave out."""

    def needs(self, context_bytes: int, devices: int) -> int:
        """The smallest memory of a device on which it goes through: context and communicators beside the allocator."""
        return self.capacity_bytes + context_bytes + nccl_bytes(devices)


def workspace_bytes(gpu: str) -> int:
    """What cuBLAS keeps for each of the two threads of a step, on the device of this name."""
    return _HOPPER_WORKSPACE if gpu.removeprefix("NVIDIA ").startswith(_HOPPER) else _WORKSPACE


def nccl_bytes(devices: int) -> int:
    """Channel buffers of NCCL's communicators, outside PyTorch's allocator: 1.5 GiB at eight devices of one host, read off
    by others (fms-acceleration, DeepSpeed issues); taken in proportion below that."""
    return 0 if devices < 2 else round(1.5 * 2**30 * min(devices, 8) / 8)


class Simulator:
    """Use as a context. ``ask`` raises EngineError when the simulation fails; the next question gets a new process."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, config: Mapping[str, Any], run: ForeignRun, workspace_bytes: int, whole: bool = False) -> Simulated:
        """Simulate ``run`` of the model with this config.json; ``workspace_bytes`` is what libraries take beside it."""
        asked = {"config": dict(config), "run": run.to_json(), "workspace_bytes": workspace_bytes, "whole": whole}
        return self.answered(asked)

    def answered(self, question: Mapping[str, Any]) -> Simulated:
        """The answer to a question in the words of ``simulate.serve``."""
        answer = self._answer(json.dumps(question))
        if "error" in answer:
            raise EngineError(f"the step could not be simulated: {answer['error']}")
        slack = answer["reserved_bytes"] - answer["live_bytes"]
        return Simulated(
            Footprint("simulated", answer["moments"], slack), answer["allocated_bytes"], answer["reserved_bytes"],
            answer["capacity_bytes"], answer["seconds"], tuple(answer.get("notes", ())),
        )  # fmt: skip

    def _answer(self, line: str) -> dict[str, Any]:
        process = self._running()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            ready = _readable(process.stdout, self.timeout_s)
            text = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            ready, text = True, b""
        if text:
            found: dict[str, Any] = json.loads(text)
            return found
        self._end()
        return {"error": f"no answer within {self.timeout_s:.0f} s" if not ready else "its process ended"}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "finefit.answers"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env,
            )  # fmt: skip
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what was never read by the process that is gone
                if pipe:
                    pipe.close()


def _readable(pipe: IO[bytes], timeout_s: float) -> bool:
    """Whether something, its end too, can be read before so many seconds are over."""
    with selectors.DefaultSelector() as selector:  # not select: a process with many files open may not use that
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))
