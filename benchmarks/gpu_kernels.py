"""What attention kernels take on a CUDA device beside their results: peaks of forward and backward, by backend.

python benchmarks/gpu_kernels.py OUT.json
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}  # fmt: skip
SIZES = [(b, n, m, s, d) for b, s in ((2, 1024), (1, 4096)) for n, m, d in ((32, 8, 128), (32, 32, 64), (16, 8, 256))]


def one(backend: str, size: tuple[int, ...], masked: bool, dtype: torch.dtype) -> dict[str, Any]:
    b, n, m, s, d = size
    gqa = n != m and not masked and backend in ("flash", "cudnn", "default", "math")
    q, k, v = (torch.randn(b, s, h, d, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
               for h in (n, m if gqa else n, m if gqa else n))  # fmt: skip
    mask = torch.zeros(b, 1, s, s, device="cuda", dtype=dtype) if masked else None
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kinds = list(BACKENDS.values()) if backend == "default" else [BACKENDS[backend]]
    with sdpa_kernel(kinds):
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)
    forward = torch.cuda.max_memory_allocated() - start
    kept = torch.cuda.memory_allocated() - start
    grad = torch.randn_like(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    name = type(out.grad_fn).__name__
    out.backward(grad)
    return {"forward_peak": forward, "kept": kept, "backward_peak": torch.cuda.max_memory_allocated() - before,
            "gradients": 2 * (q.numel() + k.numel() + v.numel()) * q.element_size() // 2, "function": name}  # fmt: skip


def main() -> None:
    rows = []
    for backend, size, masked, dtype in itertools.product(
        ("flash", "efficient", "cudnn", "math", "default"), SIZES, (False, True), (torch.bfloat16, torch.float32)
    ):
        row: dict[str, Any] = {"backend": backend, "size": size, "masked": masked, "dtype": str(dtype)}
        try:
            one(backend, size, masked, dtype)  # workspaces of the libraries are made once
            row |= one(backend, size, masked, dtype)
        except RuntimeError as error:
            row["error"] = str(error)[:120]
        rows.append(row)
        torch.cuda.empty_cache()
    Path(sys.argv[1]).write_text(
        json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows})
    )


if __name__ == "__main__":
    main()
