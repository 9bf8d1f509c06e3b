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


aten = torch.ops.aten
CUDA: Mapping[Any, Workspace] = {aten._softmax_backward_data.default: _of_first}
