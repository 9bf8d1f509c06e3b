"""A run in a process of its own whose memory the system limits while it trains: python limited.py MODEL DATA FOLDER KIND."""

import mmap
import resource
import sys
from pathlib import Path

from finefit import config, recover, session
from finefit.events import EventLog

WORDS = (
    "method=lora", "lora.rank=4", "train.global_batch_size=8", "train.max_length=512", "train.steps=6", "train.order=as_given",
    "train.learning_rate=1e-3", "train.save_every=2", "train.eval_every=0", "memory.precision=fp32",
)  # fmt: skip
# Enough to plan again, to map the file of the weights while they are loaded, and for small micro-batches.
MARGIN = 128 * 2**20
SHORT_STEPS = 3


def data_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def limit():
    """No more private memory than now and the margin: what malloc and mmap ask beyond it is refused."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + MARGIN, hard))


def taken():
    """The same limit, reached by another user of the memory, who takes what is left but for the margin."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + 20 * MARGIN, hard))
    return mmap.mmap(-1, 19 * MARGIN, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def main():
    model, data, folder, kind = sys.argv[1:]
    kept = []

    def look(event):
        if kind != "whole" and event["event"] == "step" and event["step"] == SHORT_STEPS:
            kept.append({"limited": limit, "taken": taken}[kind]())

    words = [*WORDS, f"name={kind}", f"output_dir={folder}"]
    job = session.new(config.load(None, words, {"model": model, "data": data}), None)
    with EventLog(job.folder / "events.jsonl", [look]) as log:
        print(recover.carry_out(job, log, False))


if __name__ == "__main__":
    main()
