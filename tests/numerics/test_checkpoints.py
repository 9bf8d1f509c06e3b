"""Which checkpoints stay: damaged ones are passed over once, and never count among those that are kept."""

import pytest
import torch

from finefit import adapter, checkpoint
from finefit.loop import optimizer_step
from finefit.techniques import Lora
from tiny import examples_of, run_of


def saved(run, folder, *steps, keep=9):
    for step in steps:
        optimizer_step(run, [run.collate(examples_of((24,), seed=step))], 1e-2)
        checkpoint.save(run, step, folder, "tiny", keep)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_makes_room_for_those_that_come_after_it(tmp_path, keep):
    """Steps 3 and 4 are damaged, the run goes on from 2: what it saves at step 3 is not the one that has to go."""
    run, said = run_of((Lora(4),)), []
    saved(run, tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        (tmp_path / f"step-{step:06d}" / "random.safetensors").write_bytes(b"")
    again = run_of((Lora(4),))
    assert checkpoint.load_newest(again, tmp_path, lambda message, _hint: said.append(message)) == 2
    assert len(said) == 2 and names(tmp_path) == ["step-000001", "step-000002"]
    saved(again, tmp_path, 3, keep=keep)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"][-keep:]
    assert checkpoint.damage(tmp_path / "step-000003") == ""


def test_where_all_are_damaged_none_is_thrown_away(tmp_path):
    run = run_of((Lora(4),))
    saved(run, tmp_path, 1)
    (tmp_path / "step-000001" / "manifest.json").write_text("{")
    assert checkpoint.load_newest(run, tmp_path, lambda *_: None) == 0
    assert names(tmp_path) == ["step-000001"]


def test_what_is_left_of_later_steps_goes_with_the_first_that_is_saved(tmp_path):
    run = run_of((Lora(4),))
    saved(run, tmp_path, 5, 6)
    saved(run, tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-000002"]


def test_a_checkpoint_of_another_kind_of_device_keeps_what_that_does_not_have(tmp_path):
    """One of a GPU is gone on with on a CPU: the GPU's numbers are of no use there."""
    run = run_of((Lora(4),))
    saved(run, tmp_path, 1)
    path = tmp_path / "step-000001" / "random.safetensors"
    adapter.write_tensors(path, {"cpu": torch.get_rng_state(), "cuda": torch.zeros(16, dtype=torch.uint8)})
    drawn = torch.randn(3)
    checkpoint._draw_as_then(path.parent, run)
    assert torch.equal(torch.randn(3), drawn)
    assert list(checkpoint.generators(torch.device("cpu"))) == ["cpu"]


def test_generators_go_back_to_where_they_were():
    cpu = torch.device("cpu")
    states = checkpoint.generators(cpu)
    drawn = torch.randn(5)
    checkpoint.draw_from(states, cpu)
    assert torch.equal(torch.randn(5), drawn)
