"""A compiled function's allocations: what ``torch.compile`` saves between forward and backward, and its buffers.

The function is traced with its backward by AOTAutograd and cut in two by the min-cut partitioner, which are the real
ones (``torch/_functorch``); what is saved is exact for this torch. Inductor is not run. Of the two graphs only what it
would write to memory is allocated: what leaves a graph, and what goes into or comes out of a kernel it does not write
itself (products, attention); all between is fused. A buffer that is let go is used again for the next one of its size
and type, as ``torch/_inductor/codegen/wrapper.py`` plans it.

Fake tensors only. A piece ends where upstream's graph breaks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from .workspaces import CUDA

_VIEWS = {
    "view", "_unsafe_view", "reshape", "permute", "t", "transpose", "expand", "unsqueeze", "squeeze", "slice", "select",
    "alias", "detach", "as_strided", "split", "split_with_sizes", "getitem", "_conj",
    "view_as_real", "view_as_complex",
}  # fmt: skip
_KERNELS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "embedding_dense_backward", "index_put"}
Policy = Callable[[fx.Node], bool]
"""Whether the result of a node of the forward graph is kept for backward, else computed again; asked once a node."""


@dataclass(slots=True)
class Buffer:
    """What one value of a program is: a place in memory, or a view of an input."""

    place: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(slots=True)
class Program:
    """Steps of (places made, places let go); inputs have the places 0 … and go as soon as they are last read."""

    steps: list[tuple[list[tuple[int, Buffer]], list[int]]] = field(default_factory=list)
    workspaces: dict[int, int] = field(default_factory=dict)
    """Bytes that a step's kernel takes while it runs."""
    outputs: list[Buffer | None] = field(default_factory=list)

    def run(self, inputs: list[Tensor]) -> list[Tensor | None]:
        """Allocate along the steps; ``inputs`` is emptied, so that it holds nothing here."""
        places: dict[int, Tensor] = dict(enumerate(inputs))
        inputs.clear()
        for i, (made, gone) in enumerate(self.steps):
            for place, buffer in made:
                if place not in places:  # else it is used again
                    places[place] = torch.empty_strided(buffer.size, buffer.stride, dtype=buffer.dtype)
            if i in self.workspaces:
                torch.empty(self.workspaces[i], dtype=torch.uint8)
            for place in gone:
                del places[place]
        return [None if one is None else _viewed(places[one.place], one) for one in self.outputs]


def _viewed(tensor: Tensor, buffer: Buffer) -> Tensor:
    same = tensor.shape == buffer.size and tensor.stride() == buffer.stride
    return tensor if same else tensor.as_strided(buffer.size, buffer.stride, buffer.offset)


class Piece:
    """A function of tensors, compiled once for each kind of arguments."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], kept: Callable[[], Policy] | None = None) -> None:
        self.function, self.kept = function, kept
        self.plans: dict[Any, tuple[Program, Program, int]] = {}

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        key = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
        if key not in self.plans:
            self.plans[key] = _compiled(self.function, tensors, self.kept)
        out: tuple[Tensor, ...] = _Play.apply(self.plans[key], *tensors)
        return out


class PieceOf:
    """The forward method of modules that differ in nothing but their parameters, compiled."""

    def __init__(self, like: nn.Module, kept: Callable[[], Policy] | None = None) -> None:
        self.names = [name for name, _ in like.named_parameters()]
        self.like = like
        self.piece = Piece(self._called, kept)

    def __call__(self, module: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.piece(*module.parameters(), *tensors)

    def _called(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(self.names, tensors, strict=False))
        out = torch.func.functional_call(self.like, named, tensors[len(named) :])
        return out if isinstance(out, tuple) else (out,)


class _Play(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: tuple[Program, Program, int], *tensors: Tensor) -> tuple[Tensor, ...]:
        program, ctx.backward_program, n_out = plan
        out = program.run(list(tensors))
        ctx.save_for_backward(*out[n_out:])
        results = tuple(t for t in out[:n_out] if t is not None)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [*ctx.saved_tensors, *grads]
        ctx.maybe_clear_saved_tensors()
        del grads
        return None, *ctx.backward_program.run(inputs)


def _compiled(
    function: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], kept: Callable[[], Policy] | None
) -> tuple[Program, Program, int]:
    # A thread of its own: modes and saved-tensor hooks of this one are not to see the tracing.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_traced, function, tensors, kept).result()


def _traced(
    function: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], kept: Callable[[], Policy] | None
) -> tuple[Program, Program, int]:
    from torch._functorch import partitioners
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table

    with tensors[0].fake_mode:  # type: ignore[attr-defined]
        copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
        for copy, t in zip(copies, tensors, strict=True):
            copy.requires_grad_(t.requires_grad)
        with torch.no_grad():
            n_out = len(function(*copies))
        table = select_decomp_table()
        joint: Any = aot_export_joint_simple(function, tuple(copies), trace_joint=True, decompositions=table)
        if kept is not None:
            _tag(joint.graph, kept())
        # Attention counts as random there and would be wrapped to be repeated alike: the wrapper holds nothing.
        with mock.patch.object(partitioners, "functionalize_rng_ops", lambda _joint, fw, bw, _n: (fw, bw)):
            forward, backward = partitioners.min_cut_rematerialization_partition(joint, None, num_fwd_outputs=n_out)
    return _program(forward.graph), _program(backward.graph), n_out


def _tag(graph: fx.Graph, kept: Policy) -> None:
    """Mark the forward nodes as ``torch.compile`` marks those of a checkpointed region."""
    from torch.utils.checkpoint import CheckpointPolicy

    after: set[fx.Node] = set()  # what depends on a gradient is of the backward graph
    for node in graph.nodes:
        if "tangents" in node.name or any(parent in after for parent in node.all_input_nodes):
            after.add(node)
        elif node.op == "call_function":
            parent = node.args[0] if _name(node) == "getitem" else None
            tag = CheckpointPolicy.MUST_SAVE if parent is None and kept(node) else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["recompute"] = parent.meta["recompute"] if isinstance(parent, fx.Node) else tag
            node.meta["ac_graph_id"] = 0


def _program(graph: fx.Graph) -> Program:
    return _Planner(graph).program()


class _Planner:
    """Turns a graph into steps: finds what is written to memory, how long it lives, and what takes whose place."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.returned = [one for one in self.nodes[-1].args[0] if isinstance(one, fx.Node)]
        self.written = {self._source(node) for node in self._leaving()}
        self.reads: dict[fx.Node, set[fx.Node]] = {}

    def program(self) -> Program:
        steps = [(node, self._roots_of_arguments(node)) for node in self.nodes if self._is_step(node)]
        last: dict[fx.Node, int] = {}
        for i, (node, roots) in enumerate(steps):
            last.update(dict.fromkeys((*roots, node), i))
        kept = {self._source(one) for one in self.returned}
        for one in kept:
            last[one] = len(steps)
        place = {node: i for i, node in enumerate(self.inputs)}
        out = Program()
        unread = [place[node] for node in self.inputs if node not in last]
        out.steps.append(([], unread))
        self._steps(out, steps, last, place)
        for one in self.nodes[-1].args[0]:
            out.outputs.append(self._buffer(one, place[self._source(one)]) if isinstance(one, fx.Node) else None)
        return out

    def _steps(self, out: Program, steps: Sequence[Any], last: dict[fx.Node, int], place: dict[fx.Node, int]) -> None:
        free: dict[tuple[int, torch.dtype], list[int]] = {}
        ends: dict[int, int] = {}  # place → index of the program step that lets it go
        for i, (node, roots) in enumerate(steps):
            dying = [root for root in roots if last[root] == i]
            # What a fused kernel is the last to read it may write over, if the graph made that itself.
            own = [root for root in dying if root.op != "placeholder" and not _is_kernel(node)]
            for root in own:
                ends[place[root]] = len(out.steps)
                free.setdefault(_key(root), []).append(place[root])
            made = [(self._place(one, place, free, ends, out), self._buffer(one, 0)) for one in self._made(node)]
            out.steps.append((made, [place[root] for root in own if ends.get(place[root]) == len(out.steps)]))
            if taken := _workspace(node):
                out.workspaces[len(out.steps) - 1] = taken
            self._release(out, [root for root in dying if root not in own], place, free, ends)
            unread = [one for one in self._made(node) if last.get(one, i) == i and one not in dying]
            self._release(out, unread, place, free, ends)

    def _place(
        self, node: fx.Node, place: dict[fx.Node, int], free: dict[Any, list[int]], ends: dict[int, int], out: Program
    ) -> int:
        waiting = free.get(_key(node))
        if waiting:
            place[node] = waiting.pop()
            step = ends.pop(place[node])
            if step < len(out.steps):
                out.steps[step][1].remove(place[node])
        else:
            place[node] = len(place)
        return place[node]

    def _release(
        self, out: Program, nodes: Iterable[fx.Node], place: dict[fx.Node, int], free: Any, ends: dict[int, int]
    ) -> None:
        for node in nodes:
            ends[place[node]] = len(out.steps) - 1
            out.steps[-1][1].append(place[node])
            if node.op != "placeholder":
                free.setdefault(_key(node), []).append(place[node])

    def _leaving(self) -> Iterator[fx.Node]:
        """Nodes whose value must be in memory: results, and what other kernels read."""
        yield from self.returned
        for node in self.nodes:
            if _is_kernel(node):
                yield from node.all_input_nodes

    def _is_step(self, node: fx.Node) -> bool:
        return _is_kernel(node) or (node.op == "call_function" and not _is_view(node) and node in self.written)

    def _made(self, node: fx.Node) -> list[fx.Node]:
        """The values a step writes: of a kernel with several results, those that are taken out of it."""
        if isinstance(node.meta["val"], Tensor):
            return [node]
        return [user for user in node.users if isinstance(user.meta["val"], Tensor)]

    def _source(self, node: fx.Node) -> fx.Node:
        """The node whose memory a view shows."""
        while _is_view(node):
            parent = node.args[0]
            assert isinstance(parent, fx.Node)
            if not isinstance(parent.meta["val"], Tensor) and _is_kernel(parent):
                return node
            node = parent
        return node

    def _roots(self, node: fx.Node) -> set[fx.Node]:
        """What is in memory that a value is computed from."""
        source = self._source(node)
        if source.op == "placeholder" or source in self.written or _is_kernel(source) or _is_kernel_result(source):
            return {source}
        if source not in self.reads:
            self.reads[source] = self._roots_of_arguments(source)
        return self.reads[source]

    def _roots_of_arguments(self, node: fx.Node) -> set[fx.Node]:
        return {root for parent in node.all_input_nodes for root in self._roots(parent)}

    def _buffer(self, node: fx.Node, place: int) -> Buffer:
        val = node.meta["val"]
        return Buffer(place, tuple(val.shape), tuple(val.stride()), int(val.storage_offset()), val.dtype)


def _workspace(node: fx.Node) -> int:
    found = CUDA.get(node.target)
    arguments = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    return found(arguments, None) if found and _is_kernel(node) else 0


def _name(node: fx.Node) -> str:
    target = node.target
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", ""))


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and _name(node) in _VIEWS


def _is_kernel(node: fx.Node) -> bool:
    if node.op != "call_function" or _is_view(node):
        return False
    val = node.meta.get("val")
    if isinstance(val, tuple | list) or (isinstance(val, Tensor) and val.is_complex()):
        return True  # Inductor writes no code for complex numbers
    return _name(node) in _KERNELS or "attention" in _name(node)


def _is_kernel_result(node: fx.Node) -> bool:
    parent = node.args[0] if _name(node) == "getitem" and node.args else None
    return isinstance(parent, fx.Node) and _is_kernel(parent)


def _key(node: fx.Node) -> tuple[int, torch.dtype]:
    val = node.meta["val"]
    return val.numel() * val.element_size(), val.dtype
