"""Gradients summed elsewhere, and parameters stepped there (ZeRO-Offload on one device, arXiv:2101.06840, section 4).

Each parameter has a twin on the host. A gradient is copied to its twin's, or added to it, as soon as backward has made it,
and is gone from the device; when backward is over the twins are clipped and stepped by the processor, and the weights go
back, a batch of them while the next is stepped. Copies are on a stream of their own; sums of later micro-batches are
made by a thread. The sums are pinned memory, or pages of a file; where the device is the host a twin is the same weight.
Between steps the model's weight is the one that counts: a twin is brought up to date before its step
where anything else has written to it (a checkpoint). Declines one-step-delayed updates, which are not exact.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ..scratch import is_fake, let_go
from . import side_stream
from .optimizers import Home

BYTES_ON_THE_WAY = 2**28  # of gradients that have left backward and not the device yet, and one more
_LARGE = 2**20  # bytes
MOST_ON_THE_WAY = 2  # gradients in buffers beside the sums they are for


class Elsewhere(Home):
    """``sums`` makes the storage of a gradient's sum."""

    def __init__(self, device: torch.device, sums: Callable[[Tensor], Tensor]) -> None:
        self._device, self._copies, self._made = device, _copies(device), sums
        self.twins: dict[Parameter, Parameter] = {}
        self._origin: dict[Parameter, Parameter] = {}
        self.sums: dict[Parameter, Tensor] = {}  # by twin; its gradient once one has come
        self._versions: dict[Parameter, int] = {}

    def of(self, parameter: Parameter) -> Parameter:
        if is_fake(parameter):  # nothing of a host is counted, and there is nothing to step
            parameter.register_post_accumulate_grad_hook(_forgotten)
            return Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        if self._device.type == "cpu":
            twin = Parameter(parameter.detach(), requires_grad=False)
        else:
            twin = Parameter(pinned(parameter), requires_grad=False)
            twin.data.copy_(parameter)
            self._versions[twin] = parameter._version
        self.twins[parameter], self._origin[twin] = twin, parameter
        self.sums[twin] = self._made(parameter)
        parameter.register_post_accumulate_grad_hook(self._arrived)
        return twin

    def _arrived(self, parameter: Tensor) -> None:
        """Take the gradient that backward has just made."""
        twin, gradient = self.twins[parameter], parameter.grad  # type: ignore[index]
        assert gradient is not None
        parameter.grad = None
        sums = self.sums[twin]
        if twin.grad is None:
            self._copies.copy(gradient, sums)
            twin.grad = sums
        else:
            self._copies.add(gradient, sums)
        let_go(sums)

    def gather(self) -> None:
        self._copies.finished()
        for twin, version in self._versions.items():
            if self._origin[twin]._version != version:
                twin.data.copy_(self._origin[twin])

    def back(self, parameters: Sequence[Parameter]) -> None:
        for twin in parameters:
            if twin in self._versions:  # neither a fake one nor the model's own
                origin = self._origin[twin].detach()
                self._copies.copy(twin.detach(), origin)
                self._versions[twin] = origin._version

    def cleared(self) -> None:
        self._copies.before_device()


def _forgotten(parameter: Tensor) -> None:
    parameter.grad = None


class Copies(Protocol):
    """Copies between a device and its host."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """The caller may let go of ``source`` at once; on the host it must stay as it is until all is ``finished``."""
        ...

    def add(self, gradient: Tensor, sums: Tensor) -> None:
        """``sums += gradient`` on the host, after the copies that were asked for before."""
        ...

    def finished(self) -> None:
        """Wait until all that was asked for is where it should be."""
        ...

    def before_device(self) -> None:
        """What the device does from now on comes after all copies that were asked for."""
        ...


class Direct:
    """Where the device is the host."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def add(self, gradient: Tensor, sums: Tensor) -> None:
        sums.add_(gradient)

    def finished(self) -> None:
        return None

    def before_device(self) -> None:
        return None


class Beside:
    """On a CUDA stream beside the one that computes; sums are made by a thread, from pinned buffers used in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="finefit-gradients")
        self._adding: list[Future[None]] = []
        self._leaving: deque[tuple[Any, int]] = deque()  # copies from the device, and their bytes
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        if not source.is_cuda:
            return
        source.record_stream(self.stream)  # or its memory would be given to another tensor too soon
        self._leaving.append((self.stream.record_event(), source.nbytes))
        while sum(n_bytes for _, n_bytes in self._leaving) > BYTES_ON_THE_WAY and len(self._leaving) > 1:
            self._leaving.popleft()[0].synchronize()  # where backward outruns the link, gradients would pile up

    def add(self, gradient: Tensor, sums: Tensor) -> None:
        while len(self._adding) >= MOST_ON_THE_WAY:
            self._adding.pop(0).result()
        free = self._free.setdefault((sums.shape, sums.dtype), [])
        buffer = free.pop() if free else pinned(sums)
        self.copy(gradient, buffer)
        arrived = self.stream.record_event()

        def sum_up() -> None:
            arrived.synchronize()
            sums.add_(buffer)
            free.append(buffer)

        self._adding.append(self._thread.submit(sum_up))

    def finished(self) -> None:
        for adding in self._adding:
            adding.result()
        self._adding.clear()
        self._leaving.clear()
        self.stream.synchronize()

    def before_device(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


def _copies(device: torch.device) -> Copies:
    return Beside(device) if device.type == "cuda" else Direct()


def pinned(like: Tensor) -> Tensor:
    """Memory of the host that a device copies from and to while it does other things; plain where there is no device."""
    has_device = like.is_cuda or torch.cuda.is_available()
    if has_device and like.nbytes >= _LARGE:  # PyTorch's own rounds up to a power of two
        return side_stream.pinned(like.nbytes).view(like.dtype).view(like.shape)
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=has_device)
