"""A run whose data-parallel ranks are divided and stepped by DeepSpeed (``runtime/engine.py``, 0.16 to 0.19).

The engine takes the model whole, as it was filled, and an optimizer of ours, whose rule it calls on flat parts of fp32
weights that it makes itself. Its forward is a step's, with the loss; its backward and its step stand behind the run's
scaler and optimizer. DeepSpeed averages gradients over ranks and micro-batches: a loss is already a part of the whole global
batch's, so the one is undone by the number of ranks and the other is not asked for.

Declines to hold the model in shards while it is filled: each rank reads it whole first.
"""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ..engines.alone import Alone
from ..errors import EngineError
from ..run import Run
from ..toolchain import stale_locks
from .optimizers import Home, Optimizer, Optimizing, States, Stretch
from .sharded import Whole

INSTALL = "pip install deepspeed"
OFFLOADS = ("offload_optimizer", "offload_param")


def divide(run: Run, settings: dict[str, Any]) -> None:
    """Let DeepSpeed take over when the model is filled; ``settings`` are its JSON."""
    run.context = nullcontext  # it casts the weights themselves
    made = ByDeepSpeed(run, settings, max_norm=getattr(run.clip, "keywords", {}).get("max_norm", 0.0))
    run.optimizer, run.forward, run.clip = made, made.forward, made.norm
    run.scaler = Scale(made, settings["fp16"]["enabled"])  # type: ignore[assignment]
    run.world.lockstep = True


class ByDeepSpeed(Optimizer):
    """The run's optimizer: the engine steps, by ``inner``."""

    def __init__(self, run: Run, settings: dict[str, Any], max_norm: float) -> None:
        super().__init__()
        self.run, self.through, self.rule, self.inner = run, run.forward, run.optimizer.rule, Inner()
        self.settings = {
            **settings, "gradient_clipping": max_norm,
            # Of how many micro-batches a step is, it is told as they come; more than one makes it add them up.
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
        }  # fmt: skip
        self.engine: Any = None
        self.home = Boundaries(self)
        self.has_gradients = False

    def begin(self, parameters: Any, optimizing: Optimizing) -> None:
        self.inner.rule = self.rule
        self.inner.take(parameters, optimizing)
        with torch.no_grad():
            for parameter in parameters:  # it broadcasts and flattens what it is given
                parameter.data = parameter.data.contiguous()
        self.engine = initialised(Whole(self.run.model, self.through), self.inner, self.settings, self.run.device)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self.stepped = {p: p for p in parameters}
        for flat in self.flats() if self.is_here else ():
            self.state[flat] = self.rule.start(flat)

    @property
    def zero(self) -> Any:
        """DeepSpeed's own optimizer."""
        return self.engine.optimizer

    @property
    def stage(self) -> int:
        return int(self.settings["zero_optimization"]["stage"])

    @property
    def is_here(self) -> bool:
        """Whether states are in memory."""
        offload = self.settings["zero_optimization"].get("offload_optimizer", {})
        return offload.get("device") != "nvme"

    def flats(self) -> list[Parameter]:
        """The parts of fp32 weights that this rank steps; none before `begin`."""
        if self.engine is None:
            return []
        kept = self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups
        return list(kept)

    def numel_of(self, parameter: Parameter) -> int:
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    def kept_in(self, parameter: Parameter) -> torch.dtype:
        return torch.float32 if parameter in self.stepped else parameter.dtype

    def forward(self, *args: Any) -> Tensor:
        total: Tensor = self.engine(*args)
        return total

    def norm(self, _parameters: Any, _world: Alone) -> Tensor:
        """Of all gradients, which are clipped as they are stepped by."""
        if self.stage == 3:
            norm = torch.linalg.vector_norm(torch.stack([torch.as_tensor(n) for n in self.zero._get_norm_groups()]))
        else:
            norm = torch.as_tensor(self.zero.scaled_global_norm())
        norm = norm.float() / self.zero.loss_scale
        return norm.where(norm >= 0, norm.new_full((), torch.inf))  # it says -1 of what is not finite

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.engine.step()
        self.has_gradients = False
        self.updated.update(self.stepped)

    def gradients(self) -> list[Parameter]:
        return []

    def states_of(self, parameter: Parameter) -> States:
        return {}

    def has_updated(self, parameter: Parameter) -> bool:
        return parameter in self.updated

    def all_held(self) -> list[Tensor]:
        """Masters, where they are others than the weights, and their states."""
        flats = self.flats()
        tensors = [*self.rule.shared(), *flats, *(t for flat in flats for t in self.state.get(flat, {}).values())]
        own = {t.untyped_storage().data_ptr() for t in self.weights()}
        return [t for t in tensors if t.device == self.run.device and t.untyped_storage().data_ptr() not in own]

    def weights(self) -> list[Tensor]:
        """All that this rank holds of the model."""
        found = [p.data for p in self.run.model.parameters()]
        if self.stage == 3:
            found += [p.ds_tensor.data for p in self.run.model.parameters() if hasattr(p, "ds_tensor")]
        return [t for t in found if t.device == self.run.device and t.numel()]

    def own(self) -> dict[str, list[Tensor]]:
        if self.stage < 3 or self.engine is None:
            return {}
        buckets = [bucket.buffer for bucket in getattr(self.zero, "ipg_buckets", {}).values()]
        sums = getattr(self.zero, "grad_partitions_flat_buffer", None)
        return {
            "parameter": self.weights(), "gradient": [sums] if torch.is_tensor(sums) else [],
            "temporary": [one for one in buckets if torch.is_tensor(one)],
        }  # fmt: skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.has_gradients:
            self.discard()

    def discard(self) -> None:
        """Gradients that no step is made of."""
        self.has_gradients = False
        if self.stage == 3:
            self.zero.micro_step_id = 0
            self.zero._overflow_clean_up(self.zero.loss_scale)
            return
        self.zero.micro_step_id = -1
        self.zero.zero_grad()
        if getattr(self.zero, "cpu_offload", False):
            self.zero.reset_cpu_buffers()
        for kept in (self.zero.averaged_gradients, self.zero.all_grad_tensors):
            for key in kept:
                kept[key] = None

    def whole(self) -> AbstractContextManager[Any]:
        """Within it every rank has every weight whole; what is changed there is not kept."""
        if self.stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(self.run.model.parameters()))

    def stretch(self, parameter: Tensor) -> Stretch | None:
        """Of its master: what trains is never stepped by itself."""
        if parameter not in self.stepped:
            return None
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if self.stage == 3:
            i, at, each = self.zero.grad_position[self.zero.get_param_id(parameter)]
            start, whole = rank * each, parameter.ds_numel  # type: ignore[attr-defined]
            shape, numel = tuple(parameter.ds_shape), min(each, whole - start)  # type: ignore[attr-defined]
        else:
            i = next(i for i, some in enumerate(self.zero.bit16_groups) if any(p is parameter for p in some))
            each = self.flats()[i].numel()
            begin = parameter.storage_offset() - self.zero.bit16_groups_flat[i].storage_offset() - rank * each
            at, start = max(begin, 0), max(-begin, 0)
            shape, numel = tuple(parameter.shape), min(parameter.numel() - start, each - at)
        return Stretch(self.flats()[i], f"flat {i} of rank {rank} of {ranks}", at, start, max(numel, 0), shape)

    def restored(self) -> None:
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        self.zero.checkpoint_event_prologue()  # what is gathered is let go of
        for i in range(len(self.flats())):
            self.zero._reassign_or_swap_out_partitioned_parameters(i)
        self.zero.checkpoint_event_epilogue()  # small weights are whole again


class Inner(Optimizer):
    """What DeepSpeed calls: the rule, on whatever flat parts it has made by then."""

    def take(self, parameters: Any, optimizing: Optimizing) -> None:
        settings = {"lr": optimizing.learning_rate, "betas": optimizing.betas, "eps": optimizing.eps}
        self.param_groups.clear()
        for matrices, decay in ((True, optimizing.weight_decay), (False, 0.0)):
            if found := [p for p in parameters if (p.dim() > 1) is matrices]:
                self.add_param_group({"params": found, "weight_decay": decay, **settings})

    def update(self, group: Any, parameters: Any) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self.rule.start(parameter)
        super().update(group, parameters)


class Boundaries(Home):
    """Says which micro-batch is a step's last."""

    def __init__(self, by: ByDeepSpeed) -> None:
        self.by = by

    def before(self, is_last: bool) -> None:
        self.by.has_gradients = True
        self.by.engine.set_gradient_accumulation_boundary(is_last)


class Backward:
    """A loss as the engine goes back from it."""

    def __init__(self, engine: Any, loss: Tensor) -> None:
        self.engine, self.loss = engine, loss

    def backward(self) -> None:
        self.engine.backward(self.loss * dist.get_world_size(), scale_wrt_gas=False)


class Scale:
    """Stands where a scaler does; the engine has its own."""

    def __init__(self, by: ByDeepSpeed, is_on: bool) -> None:
        self.by, self.is_on = by, is_on

    def is_enabled(self) -> bool:
        return self.is_on

    def scale(self, loss: Tensor) -> Backward:
        return Backward(self.by.engine, loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        """With the step."""

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def update(self, new_scale: float | None = None) -> None:
        """With the step, unless it is said."""
        if new_scale is not None and self.is_on:
            self.by.zero.loss_scaler.cur_scale = new_scale

    def get_scale(self) -> float:
        return float(self.by.zero.loss_scale)

    def state_dict(self) -> dict[str, float]:
        """As torch's own has it: with the steps since it was last halved."""
        scaler = self.by.zero.loss_scaler
        return {"scale": self.get_scale(), "_growth_tracker": scaler.cur_iter - scaler.last_overflow_iter - 1}

    def load_state_dict(self, state: dict[str, float]) -> None:
        scaler = self.by.zero.loss_scaler
        scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = state["scale"], state["_growth_tracker"], -1


def check_builds(settings: dict[str, Any]) -> None:
    """EngineError where a build that is needed would be waited for without end."""
    zero = settings["zero_optimization"]
    compiled = {"async_io"} if "nvme" in (zero.get(part, {}).get("device") for part in OFFLOADS) else set()
    for lock in stale_locks():
        if lock.parent.name in compiled:
            raise EngineError(f"a build of deepspeed's that was killed left {lock}", hint=f"rm '{lock}'")


def initialised(model: Whole, inner: Optimizer, settings: dict[str, Any], device: torch.device) -> Any:
    """DeepSpeed's engine around ``model``; EngineError where it is not there."""
    check_builds(settings)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except ImportError as error:
        raise EngineError(
            f"deepspeed cannot be imported: {error}", hint=f"{INSTALL}; finefit doctor says more"
        ) from error
    deepspeed.utils.logger.setLevel("ERROR")
    # It calls torch's collectives by names that torch 2.13 warns of, in every step.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    if device.type == "cpu":  # sums of inference by shared memory, which would be compiled first
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl", dist_init_required=False, verbose=False)
    head = model.model.get_output_embeddings()
    if settings["zero_optimization"]["stage"] == 3:  # the loss multiplies with it by itself
        deepspeed.zero.register_external_parameter(model, head.weight)
    engine, *_ = deepspeed.initialize(model=model, optimizer=inner, config=settings, dist_init_required=False)
    return engine
