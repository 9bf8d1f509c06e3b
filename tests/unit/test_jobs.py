"""Job files: a shell, YAML and Python read them, and the line in them is a command of ours."""

import shlex
import subprocess

import pytest
import yaml
from typer.main import get_command

from finefit import jobs
from finefit.cli import app
from finefit.data.micro import shared_out, split
from finefit.errors import ConfigError
from finefit.words import count_of, of_devices, of_machines

WORDS = ["meta-llama/Llama-3.1-8B", "my data.jsonl", "name=big", "method=full"]
JOB = jobs.Job(WORDS, 4, 8)
COMMANDS = get_command(app).commands


def words_after(line, mark):
    words = shlex.split(line)
    return words[words.index(mark) + 1 :]


def test_the_line_of_each_machine_is_torchs_launcher_with_our_verb():
    line = jobs.Job(WORDS, 4, 8, "head").command("head")
    assert shlex.split(line)[:5] == ["torchrun", "--nnodes", "4", "--nproc-per-node", "8"]
    assert "head:29500" in shlex.split(line)
    ours = words_after(line, "finefit")
    assert COMMANDS[ours[0]].make_context(ours[0], ours[1:]).params["words"] == WORDS


def test_a_shell_reads_slurms_file(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(jobs.text_of(JOB, "slurm"))
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
    assert {"#SBATCH --nodes=4", "#SBATCH --gpus-per-node=8"} <= set(path.read_text().splitlines())


def test_skypilots_file_is_yaml_and_rays_is_python():
    task = yaml.safe_load(jobs.text_of(JOB, "skypilot"))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (4, "H100:8")
    assert "--nnodes 4" in task["run"]
    compile(jobs.text_of(JOB, "ray"), "ray", "exec")


def test_a_form_that_is_not_known_is_told_the_nearest():
    with pytest.raises(ConfigError) as told:
        jobs.text_of(JOB, "slrum")
    assert "slurm" in told.value.hint


@pytest.mark.parametrize("nodes, each", [(0, 8), (2, 0)])
def test_no_machine_and_no_device_are_refused(nodes, each):
    with pytest.raises(ConfigError):
        jobs.Job(WORDS, nodes, each)


def test_devices_are_a_count_or_processes_of_a_kind():
    assert of_devices("4") == ["hardware.devices=4"]
    assert of_devices("cpu:2") == ["hardware.device=cpu", "hardware.devices=2"]
    assert count_of("cuda:8") == 8
    assert of_machines("H100", "8", 8) == "64 x H100 SXM"


def test_ranks_that_wait_for_each_other_have_as_many_micro_batches():
    """Halved where there are examples to halve, empty where there are none."""
    lengths = [60, 60, 60, 60, 60, 16, 16]
    apart = shared_out(lengths, lambda some: split(some, 4, 64), 2, as_many=False)
    assert [len(groups) for groups in apart] == [4, 3]
    together = shared_out(lengths, lambda some: split(some, 4, 64), 2, as_many=True)
    assert [len(groups) for groups in together] == [4, 4]
    assert sorted(i for groups in together for group in groups for i in group) == list(range(7))
    assert together[1].count([]) == 1
