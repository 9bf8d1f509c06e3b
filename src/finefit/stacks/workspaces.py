"""What CUDA kernels take from the allocator while they run, beside their results, by operator.

``aten/src/ATen/native/cuda/SoftMax.cu`` (softmax_backward_cuda_out multiplies gradient and output first) and
``SortStable.cu``; attention's are in ``attention``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ledger import Workspace


def _of_first(args: Sequence[Any], _out: Any) -> int:
    tensor = args[0]
    return int(tensor.numel() * tensor.element_size())


def _flash_backward(args: Sequence[Any], _out: Any) -> int:
    """As ``attention.Flash`` takes it: two fp32 sums of the queries' gradient, and whole gradients of repeated heads."""
    q, k = args[1], args[2]
    (b, n, s, d), keys = q.shape, k.shape[2]
    rounded, wide = -(-s // 128) * 128, -(-d // 32) * 32 if d <= 128 else -(-d // 64) * 64
    repeated = 2 * b * keys * n * d * q.element_size() if k.shape[1] != n else 0
    return int(4 * b * n * rounded * (1 + wide) + repeated)


aten = torch.ops.aten
CUDA: Mapping[Any, Workspace] = {
    aten._softmax_backward_data.default: _of_first,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
}
