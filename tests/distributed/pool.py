"""Real processes that are the ranks of a world: gloo over loopback, begun once for all tests of a file.

Each takes calls as lines of JSON, carries them out with the others, and answers with JSON. Where one raises the others may
wait for it for ever, so all are ended, and begun anew for the next call.
"""

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

from finefit.mesh import Mesh

HERE = Path(__file__).resolve().parent
LIMIT_S = 120


NOTES = []


def note(mesh, kind, what, ranks, engine="torch"):
    """Of a mesh and what it was tried with: that it was ``exact``, or had the ``bytes``, on so many ranks."""
    NOTES.append({"mesh": Mesh(**mesh).says(), "engine": engine, "with": kind, "what": what, "ranks": ranks})


class Failed(AssertionError):
    """What a rank said before it raised."""


class Ranks:
    def __init__(self, size):
        self.size, self.processes = size, []

    def call(self, function, *args, limit_s=LIMIT_S):
        """``function`` of ``work`` on all ranks with the same arguments; what each returns, by rank."""
        if not self.processes:
            self._begin()
        line = json.dumps({"call": function, "args": args}).encode() + b"\n"
        for process in self.processes:
            process.stdin.write(line)
            process.stdin.flush()
        answers, error = {}, ""
        ends = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.size and not error:
                ready = selector.select(max(ends - time.monotonic(), 0))
                for key, _ in ready:
                    text = key.fileobj.readline()
                    answer = json.loads(text) if text else {"error": "it ended without a word"}
                    answers[key.data] = answer.get("result")
                    error = error or (f"rank {key.data}: {answer['error']}" if "error" in answer else "")
                    selector.unregister(key.fileobj)
                if not ready:
                    error = f"no answer within {limit_s} s from {set(range(self.size)) - set(answers)}"
        if error:
            self.end()
            raise Failed(error)
        return [answers[rank] for rank in range(self.size)]

    def _begin(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(HERE / "work.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment_of(rank, self.size, port),
            )
            for rank in range(self.size)
        ]

    def end(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self.processes = []


def environment_of(rank, size, port):
    """As torch's launcher sets it, one thread to a process."""
    return {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]),
    }  # fmt: skip
