"""FlashAttention over packed sequences against finefit's own segment attention, on a CUDA device: values and gradients.

python benchmarks/gpu_attention.py        prints the largest differences, relative to fp32; fails above two roundings
"""

import sys

import torch

from finefit.nn.attention import Form, SegmentAttention
from finefit.nn.flash import PackedFlash

BOUNDS = (0, 48, 176, 1200, 1216)


def one(function: type, dtype: torch.dtype, form: Form, groups: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(BOUNDS[-1], 8, 64), (BOUNDS[-1], 8 // groups, 64), (BOUNDS[-1], 8 // groups, 64)]
    q, k, v = (torch.randn(s, device="cuda", generator=generator).to(dtype).requires_grad_() for s in shapes)
    out = function.apply(q, k, v, BOUNDS, form)  # type: ignore[attr-defined]
    out.backward(torch.randn(shapes[0], device="cuda", generator=generator).to(dtype))
    return [out.detach().float(), *(t.grad.float() for t in (q, k, v))]


def main() -> int:
    worst = 0.0
    for window in (None, 100):
        for groups in (1, 4):
            form = Form(0.125, window)
            exact = one(SegmentAttention, torch.float32, form, groups)
            ours = one(PackedFlash, torch.bfloat16, form, groups)
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]
            print("window", window, "groups", groups, [f"{e:.2e}" for e in errors])
            worst = max(worst, *errors)
    return int(worst > 2 * 2**-8)


if __name__ == "__main__":
    sys.exit(main())
