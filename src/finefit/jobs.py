"""A run on several machines as others start it: torch's launcher on each, or a job file for a cluster's scheduler.

The same line runs on every machine; the processes meet at the first one's address and agree on ranks by themselves
(torch's c10d rendezvous). All machines need the model, and a folder that they share for ``output_dir``: each rank writes
its part of a checkpoint there. A machine that is lost ends all, and what is left begins again from the last checkpoint up
to three times (``--max-restarts``). Torch-free. Declines to copy data or code to machines.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError, did_you_mean
from .files import write_atomically

PORT = 29500
RESTARTS = 3
HOST = "FIRST_MACHINE"  # stands where no name was given


@dataclass(frozen=True, slots=True)
class Job:
    """``words`` are those of ``finefit train``."""

    words: list[str]
    nodes: int
    gpus_per_node: int
    host: str = ""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ConfigError(
                "a machine, and a device in it, are the least there can be", hint="--nodes 2 --gpus-per-node 8"
            )

    @property
    def name(self) -> str:
        return next((word.partition("=")[2] for word in self.words if word.startswith("name=")), "finefit")

    def command(self, host: str) -> str:
        """For a shell. ``host`` may be a variable of it."""
        return f"torchrun --nnodes {self.nodes} --nproc-per-node {self.gpus_per_node} {_meeting(self.name, host)} {self._train}"

    @property
    def _train(self) -> str:
        return f"-m finefit train {shlex.join(self.words)} --log-format plain"


def _meeting(name: str, host: str) -> str:
    return f"--rdzv-backend c10d --rdzv-endpoint {host}:{PORT} --rdzv-id {shlex.quote(name)} --max-restarts {RESTARTS}"


def text_of(job: Job, form: str) -> str:
    """The lines, or the job file, of one of ``FORMS``."""
    if form not in FORMS:
        raise ConfigError(
            f"there is no job file for '{form}'", hint=did_you_mean(form, FORMS) or f"say {', '.join(FORMS)}"
        )
    return FORMS[form](job)


def _torchrun(job: Job) -> str:
    where = f"# on each of the {job.nodes} machines" if job.nodes > 1 else "# on the machine"
    host = job.host or ("localhost" if job.nodes == 1 else HOST)
    known = f"\n# {HOST}: name or address of one of them, the same in each line (--host)" if host == HOST else ""
    return f"{where}{known}\n{job.command(host)}\n"


def _slurm(job: Job) -> str:
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus_per_node}
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --signal=USR1@120
#SBATCH --requeue
# Two minutes before its time is over every rank saves and stops; submitted again, the run goes on from there.
set -euo pipefail
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 {job.command('"$head_node"')}
"""


def _skypilot(job: Job) -> str:
    return f"""name: {job.name}
num_nodes: {job.nodes}
resources:
  accelerators: H100:{job.gpus_per_node}
# Checkpoints are written by all ranks: file_mounts must give every machine the same output_dir.
file_mounts:
  ~/runs:
    name: {job.name}-runs
    mode: MOUNT
setup: |
  pip install 'finefit[train]'
run: |
  cd ~
  head_node=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  {job.command('"$head_node"')}
"""


def _ray(job: Job) -> str:
    line = job.command("$head_node")
    return f'''"""Start with: ray job submit -- python {job.name}.py"""
import os
import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LINE = {line!r}


@ray.remote
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def run(head_node):
    return subprocess.run(["bash", "-c", LINE], env={{**os.environ, "head_node": head_node}}, check=True).returncode


ray.init()
group = placement_group([{{"CPU": 1, "GPU": {job.gpus_per_node}}}] * {job.nodes}, strategy="STRICT_SPREAD")
ray.get(group.ready())
places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range({job.nodes})]
head_node = ray.get(address.options(num_cpus=1, scheduling_strategy=places[0]).remote())
wanted = dict(num_cpus=1, num_gpus={job.gpus_per_node})
ray.get([run.options(scheduling_strategy=place, **wanted).remote(head_node) for place in places])
'''


FORMS: dict[str, Callable[[Job], str]] = {"torchrun": _torchrun, "slurm": _slurm, "skypilot": _skypilot, "ray": _ray}


def write(text: str, path: Path | None) -> None:
    if path is None:
        print(text, end="")
    else:
        write_atomically(path, text.encode())


def run(job: Job) -> None:
    """This machine's part, to its end; SystemExit with its code."""
    host = job.host or "localhost"
    if job.nodes > 1 and not job.host:
        raise ConfigError("the machines need an address to meet at", hint="--host NAME, the same on each")
    command = shlex.split(job.command(host))[1:]
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", *command], env=dict(os.environ), check=False)
    raise SystemExit(done.returncode)
