"""What ``ranks`` makes of a simulated step against a real FSDP 2 step of the same model, by PyTorch's own tracker."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from finefit.foreign import ForeignRun, Spread
from finefit.ledger import NoLedger
from finefit.ranks import of_rank
from finefit.sharding import computed_as
from finefit.simulate import STEADY, fake_world, step_stream
from finefit.stacks import builder_of

RANKS = 4
CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1021,
}  # fmt: skip
RUN = ForeignRun(
    "torchtitan", "m", "full", 2, 128, trained_dtype="float32", foreach=False, clipped=False, packed=True,
    spread=Spread(data=RANKS, shard_stage=3, shards=RANKS, engine="fsdp2", reduce_dtype="float32"),
)  # fmt: skip


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Four ranks of which only this one is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def _real(run: ForeignRun, mesh: Any) -> dict[str, dict[str, int]]:
    """Bytes by the tracker's categories at the peaks of the second step's forward, backward and update."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    out: dict[str, dict[str, int]] = {}
    with fake_world():
        stepped = builder_of(run.tool)(CONFIG, run, CONFIG["num_hidden_layers"])
        for block in stepped.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(stepped.model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(stepped.model.parameters(), foreach=False)
        ids = torch.zeros(run.micro_batch_size, run.max_length, dtype=torch.int64)
        tracker: Any = FSDPMemTracker(stepped.model, optimizer)
        tracker.track_inputs((ids,))

        def noted(name: str) -> None:
            (snapshot,) = tracker.get_tracker_snapshot("peak").values()
            out[name] = {str(key).rpartition(".")[2]: n for key, n in snapshot.items()}
            tracker._peak_mem.clear()
            tracker._peak_mem_snap.clear()

        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                loss = stepped.loss(ids, ids, NoLedger())
                noted("forward")
                loss.backward()
                del loss
                noted("backward")
                optimizer.step()
                optimizer.zero_grad()
                noted("update")
    return out


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_rank_holds_what_a_real_one_does(checkpointing: Any, mesh: Any) -> None:
    run = replace(RUN, checkpointing=checkpointing)
    real = _real(run, mesh)
    moments = of_rank(step_stream(CONFIG, computed_as(run)), run).moments(STEADY)
    ours = {name: sum(parts.values()) for name, parts in moments.items()}
    assert real["forward"]["SHARDED_PARAM"] == real["update"]["SHARDED_GRAD"] == moments["loss"]["parameter"]
    counts = 4 * (9 * CONFIG["num_hidden_layers"] + 3)  # of steps, one for each tensor
    assert real["forward"]["OPT"] - counts == moments["loss"]["optimizer_state"]
    assert max(ours["forward_end"], ours["loss"]) == pytest.approx(real["forward"]["Total"], rel=0.001)
    assert ours["backward_peak"] == pytest.approx(real["backward"]["Total"], rel=0.001)
