"""The simulated witness: a whole training step under fake tensors, storages followed one by one, no weights, no GPU.

Two optimizer steps are taken, the second is kept: it has optimizer states. A shallow model is stepped and its middle
block repeated (``stream.unrolled``), which is exact for blocks of one kind or a repeating pattern; models of another
build are stepped whole. Attention, dropout and the multi-tensor update allocate as on a CUDA device.

Asked by ``witness`` through ``answers``, in a subprocess: the switches set here are the
process's, and a model that cannot be stepped may take the process with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .build import rewritten
from .catalog.configs import depth_key
from .engines.world import pretended
from .fakes import OneOf, without_values
from .foreign import ForeignRun
from .layout import Micro
from .ledger import Ledger
from .meshes import mesh_of
from .models import fill_empty
from .nn.attend import standing_for
from .nn.optimizers import Optimizing
from .run import MicroBatch, trainable
from .stacks import builder_of
from .stacks.adapters import Packed
from .stacks.attention import cuda_kernels
from .stacks.base import Stepped
from .stacks.optimizers import optimizer_of
from .stacks.transformers import shallow_config
from .stacks.workspaces import CUDA
from .stream import Pattern, Stream, pattern_of, unrolled
from .techniques import Accumulation, Checkpointing, Technique
from .trace import batch_of, run_step

MICRO_STEPS = 2
_UNADAPTED = 3  # LLaMA-Adapter leaves the first two blocks as they are, and the third has no neighbour alike
STEADY = "steady"


def step_stream(config: Mapping[str, Any], run: ForeignRun, whole: bool = False) -> Stream:
    """The allocations of one steady optimizer step of ``run`` on one device, before anything is sharded."""
    depth, pattern = layers_of(config, run.method.startswith("adapter"))
    shallow = depth if whole else pattern.shallow(depth)[0]
    ledger = Ledger(CUDA)
    with fake_world(run.attention if run.attention != "sdpa" else None):
        stepped = builder_of(run.tool)(config, run, shallow)
        step(stepped, run, ledger, torch.device("cpu"))
    return _deep(ledger, pattern, shallow, depth) or step_stream(config, run, whole=True)


def _deep(ledger: Ledger, pattern: Pattern, shallow: int, depth: int, first: int = 0) -> Stream | None:
    """The stream of the whole depth; None where the blocks turn out not to repeat, and the whole must be stepped."""
    if shallow == depth:
        return ledger
    try:
        return unrolled(ledger, pattern, depth, first)
    except KeyError:
        return None


def plan_stream(
    config: Mapping[str, Any], techniques: Sequence[Technique], micro: Micro, kind: str = "cpu", whole: bool = False,
    context: int = 1,
) -> Stream:  # fmt: skip
    """The allocations of one step of finefit's own run: the real techniques on the real model.

    ``kind``: cpu or cuda, the device it stands for, one of ``context`` that share the tokens.
    """
    from transformers import AutoConfig

    depth, pattern = layers_of(config)
    whole = whole or any(isinstance(t, Checkpointing) and t.group > 1 for t in techniques)  # groups that are not alike
    first = next((min(t.blocks, depth) for t in techniques if isinstance(t, Checkpointing)), 0)
    shallow, some = (depth, first) if whole else pattern.shallow(depth, first)
    fitted = [replace(t, blocks=some) if isinstance(t, Checkpointing) else t for t in techniques]
    steps = next((t.most_steps for t in techniques if isinstance(t, Accumulation)), 1)
    made = AutoConfig.for_model(**shallow_config(config, shallow)).get_text_config()
    ledger = Ledger(CUDA if kind == "cuda" else None)
    with standing_for(kind), without_values(), pretended(mesh_of(fitted)) as world:
        run = rewritten(made, fitted, torch.device("cpu"), world)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fill_empty(run.model, run.device)
            run.optimizer.begin(trainable(run.model), Optimizing())
            run_step(run, _share(micro, context), ledger, min(steps, MICRO_STEPS))
    return _deep(ledger, pattern, shallow, depth, first) or plan_stream(config, techniques, micro, kind, True, context)


def _share(micro: Micro, ranks: int) -> MicroBatch:
    """What one of the ranks has that share the tokens, with as many labels as it may have."""
    if ranks == 1:
        return batch_of(micro)
    tokens = micro.tokens // ranks
    part = batch_of(replace(micro, tokens=tokens, labelled=min(micro.labelled, tokens)))
    return replace(part, bounds=batch_of(micro).bounds, exchange=OneOf(ranks))


def layers_of(config: Mapping[str, Any], adapted: bool = False) -> tuple[int, Pattern]:
    """Depth and how its blocks repeat, from the config's own words."""
    depth = int(config[depth_key(config)])
    kinds = ["" for _ in range(depth)]
    types = config.get("layer_types") or []
    dense = config.get("first_k_dense_replace", 0) or 0
    turned = config.get("no_rope_layer_interval") or (4 if config.get("model_type") == "smollm3" else 0)
    window = config.get("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(
        str(config.get("model_type")), 0
    )
    for i in range(depth):
        kinds[i] = str(types[i]) if i < len(types) else "sliding" if window and (i + 1) % window else ""
        kinds[i] += " unadapted" if adapted and i < _UNADAPTED else ""
        kinds[i] += " dense" if i < dense else ""
        kinds[i] += " unturned" if turned and (i + 1) % turned == 0 else ""
    return depth, pattern_of(kinds)


@contextmanager
def fake_world(forced: Any = None) -> Iterator[None]:
    """Fake tensors on the CPU that allocate as CUDA tensors would."""
    from transformers import masking_utils

    # transformers takes fake tensors for tracing and would then keep an explicit mask.
    packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        with cuda_kernels(forced), FakeTensorMode(allow_non_fake_inputs=True), _Scalars():
            yield
    finally:
        masking_utils.find_packed_sequence_indices = packed


class _Scalars(TorchDispatchMode):
    """Answers questions for a value with one, as there are no values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


def step(stepped: Stepped, run: ForeignRun, ledger: Ledger, device: torch.device) -> None:
    """Two optimizer steps under the ledger; ``steady`` is marked between them."""
    optimizer = optimizer_of(stepped.model, run)
    batch = [torch.zeros(run.micro_batch_size, run.max_length, dtype=torch.int64, device=device) for _ in range(2)]
    _own(stepped, batch, ledger)
    with ledger, watched(stepped.blocks, ledger):
        one_step(stepped, replace(run, accumulation=1), optimizer, batch, ledger)
        for p, state in ((p, state) for one in optimizer for p, state in one.state.items()):
            held = [t for t in state.values() if isinstance(t, Tensor)]
            ledger.own(held, "optimizer_state")
            ledger.inherit(held, [p] * len(held))
        ledger.mark(STEADY)
        one_step(stepped, run, optimizer, batch, ledger)
        ledger.mark("end")


def one_step(stepped: Stepped, run: ForeignRun, optimizer: Any, batch: Sequence[Tensor], ledger: Any) -> None:
    """Forward, loss and backward of the micro-batches (two at most: the third is as the second), clip, update."""
    micro = min(run.accumulation, MICRO_STEPS)
    for _ in range(micro):
        ledger.mark("forward before")
        loss = stepped.loss(batch[0], batch[1], ledger)
        ledger.mark("backward start")
        (loss / micro if micro > 1 else loss).backward()
        del loss
        ledger.mark("idle")
    trained = [p for p in stepped.model.parameters() if p.requires_grad]
    if isinstance(ledger, Ledger):
        ledger.own((p.grad for p in trained), "gradient")
    ledger.mark("optimizer")
    if not run.step_in_backward:
        if run.clipped:
            nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _own(stepped: Stepped, batch: Sequence[Tensor], ledger: Ledger) -> None:
    """Parameters by block, so that unrolling multiplies them, and the batch."""
    seen: set[int] = set()
    for i, block in enumerate(stepped.blocks):
        ledger.mark(f"own {i}")
        mine = [t for t in (*block.parameters(), *block.buffers()) if id(t) not in seen]
        seen.update(id(t) for t in mine)
        ledger.own(mine, "parameter")  # packed weights are buffers
    ledger.mark("own rest")
    ledger.own((p for p in stepped.model.parameters() if id(p) not in seen), "parameter")
    ledger.own((b for b in stepped.model.buffers() if id(b) not in seen), "input")
    ledger.own(batch, "input")
    ledger.leave_whole(t for m in stepped.model.modules() if isinstance(m, Packed) for t in m.beside())


@contextmanager
def watched(blocks: nn.ModuleList, ledger: Ledger) -> Iterator[None]:
    """Each block opens ``forward i`` when it is called and ``backward i`` when a gradient reaches its output."""
    inner = list(blocks)
    for i, block in enumerate(inner):
        blocks[i] = _Watched(block, i, ledger)
    try:
        yield
    finally:
        for i, block in enumerate(inner):
            blocks[i] = block


class _Watched(nn.Module):
    def __init__(self, block: nn.Module, i: int, ledger: Ledger) -> None:
        super().__init__()
        self.block, self.i = block, i
        object.__setattr__(self, "ledger", ledger)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ledger, i = self.ledger, self.i
        if ledger.sections[-1].startswith("backward"):  # computed again
            return self.block(*args, **kwargs)
        ledger.mark(f"forward {i}")
        output = self.block(*args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _grad: ledger.mark(f"backward {i}"))
        ledger.mark_at_next_birth("forward after")
        return output
