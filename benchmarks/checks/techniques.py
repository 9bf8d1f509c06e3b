"""Every technique on the device: rehearsed with its own post-condition, its loss and gradients beside the processor's.

Alone in fp32, where a device may differ by the order of a sum; and as a plan uses it, in bf16 with everything a plan
turns on, where it may differ by roundings to 8 bits.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from checks.common import (
    CPU,
    At,
    Check,
    Figures,
    Weights,
    after_steps,
    at_most,
    config_of,
    equal,
    error,
    examples_of,
    loss_and_gradients,
    run_of,
)  # fmt: skip
from finefit.rehearse import rehearse
from finefit.techniques import (
    Accumulation,
    ActivationOffload,
    Allocator,
    Checkpointing,
    Clipping,
    FusedBackwardStep,
    FusedLoss,
    FusedOps,
    Lora,
    OptimizerOffload,
    OptimizerStates,
    Packing,
    ParameterOffload,
    Precision,
    QuantizedBase,
    Technique,
    in_order,
)  # fmt: skip

LORA = Lora(8)
IN_A_PLAN = (FusedOps(), Packing(), Checkpointing(3), FusedLoss(64), Accumulation(2, most_steps=2), Clipping(1.0))
# Relative error of the loss, and of all gradients together. What a device quantises itself may fall on other codes.
FP32, QUANTISED, BF16 = (1e-5, 2e-4), (1e-3, 1e-2), (2e-2, 8e-2)


@dataclass(frozen=True, slots=True)
class Case:
    """A technique with what it needs; ``cuda``: on a device beside its host alone."""

    technique: Technique
    needs: tuple[Technique, ...] = ()
    cuda: bool = False

    def beside(self, others: Sequence[Technique]) -> tuple[Technique, ...]:
        """All of them, one of each kind, this case's first."""
        mine = (self.technique, *self.needs)
        kinds = {type(t) for t in mine}
        return in_order((*mine, *(t for t in others if type(t) not in kinds)))


CASES = {
    "fused_ops": Case(FusedOps()),
    "packing": Case(Packing()),
    "fused_loss": Case(FusedLoss(48)),
    "accumulation": Case(Accumulation(1, most_steps=4)),
    "clipping": Case(Clipping(0.05)),
    "lora": Case(LORA),
    **{f"checkpointing {kind}": Case(Checkpointing(5, kind))
       for kind in ("block", "attention", "mlp", "selective", "nested")},
    "activation_offload host": Case(ActivationOffload("host"), (Checkpointing(5),), cuda=True),
    "activation_offload disk": Case(ActivationOffload("disk"), (Checkpointing(5),)),
    "parameter_offload host": Case(ParameterOffload("host"), (LORA,), cuda=True),
    "parameter_offload disk": Case(ParameterOffload("disk"), (LORA,)),
    "optimizer_offload host": Case(OptimizerOffload("host", "host"), cuda=True),
    "optimizer_offload disk": Case(OptimizerOffload("disk", "host")),
    "optimizer_offload disk, sums too": Case(OptimizerOffload("disk", "disk")),
    **{f"quantized_base {bits}, scales {scales}": Case(QuantizedBase(bits, scales, 2**14), (LORA,))
       for bits in (8, 4, 3, 2) for scales in ("double", "plain")},
    "quantized_base 4, streamed": Case(ParameterOffload("disk"), (LORA, QuantizedBase(4, "double", 2**14))),
    "optimizer_states": Case(OptimizerStates("adamw_8bit", chunk=2**14)),
    "allocator": Case(Allocator("expandable"), cuda=True),
}  # fmt: skip
ADAPTED = (Lora, QuantizedBase)


@functools.cache
def reference(at: At, weights: tuple[Technique, ...]) -> tuple[float, Weights]:
    """Loss and gradients of the plain run of the same method on the processor, in fp32."""
    config = config_of(at)
    return loss_and_gradients(run_of(weights, config, CPU), examples_of(at, config))


def _weights(techniques: Sequence[Technique]) -> tuple[Technique, ...]:
    """Of these what says which weights there are, and how far gradients are clipped."""
    return tuple(t for t in techniques if isinstance(t, (*ADAPTED, Clipping)))


def _checked(at: At, techniques: tuple[Technique, ...], most: tuple[float, float]) -> Figures:
    config = config_of(at)
    examples = examples_of(at, config)
    run = run_of(techniques, config, at.device)
    steps = next((t.most_steps for t in techniques if isinstance(t, Accumulation)), 1)
    size = next((t.micro_batch_size for t in techniques if isinstance(t, Accumulation)), 1)
    rehearse(run, sorted(examples, key=lambda e: -len(e[0]))[:size], examples[-2:], techniques, steps)
    loss, gradients = loss_and_gradients(run, examples)
    expected_loss, expected = reference(at, _weights(techniques))
    off, loss_off = error(gradients, expected), abs(loss / expected_loss - 1)
    at_most("loss beside the processor's", loss_off, most[0])
    at_most("gradients beside the processor's", off, most[1])
    return {"loss_error": loss_off, "gradient_error": off}


def alone(case: Case, at: At) -> Figures:
    chosen = case.beside(())
    return _checked(at, chosen, QUANTISED if any(isinstance(t, QuantizedBase) for t in chosen) else FP32)


def in_a_plan(case: Case, at: At) -> Figures:
    chosen = case.beside(IN_A_PLAN)
    if any(isinstance(t, ActivationOffload) for t in chosen):
        chosen = tuple(replace(t, kind="block") if isinstance(t, Checkpointing) else t for t in chosen)
    kind = "bf16" if any(isinstance(t, Lora) for t in chosen) else "bf16_mixed"
    return _checked(at, (Precision(kind), *chosen), BF16)


def stepped_in_backward(at: At) -> Figures:
    """Weights after three steps, with and without."""
    config = config_of(at)
    examples = examples_of(at, config)
    whole = Accumulation(len(examples))
    twice = [after_steps(run_of((Packing(), whole), config, at.device), examples) for _ in range(2)]
    run = run_of((Packing(), whole, FusedBackwardStep()), config, at.device)
    rehearse(run, examples, examples[-2:], (FusedBackwardStep(),), 1)
    return equal("weights", after_steps(run, examples), twice)


def dropout_again(kind: str, at: At) -> Figures:
    """Dropout of a block that is computed again is what it was: the same gradients as of a run that keeps all."""
    config = config_of(at)
    examples, found = examples_of(at, config), []
    for extra in ((), (), (Checkpointing(6, kind),)):
        run = run_of((Lora(8, dropout=0.2), FusedOps(), Packing(), *extra), config, at.device)
        found.append(after_steps(run, examples, 1))
    return equal("weights after dropout", found[2], found[:2])


CHECKS = {
    **{f"{name}, alone": Check(functools.partial(alone, case), case.cuda) for name, case in CASES.items()},
    **{f"{name}, in a plan": Check(functools.partial(in_a_plan, case), case.cuda) for name, case in CASES.items()},
    "fused_backward_step": Check(stepped_in_backward),
    **{f"dropout, checkpointing {kind}": Check(functools.partial(dropout_again, kind)) for kind in ("block", "nested")},
}
