"""Weights cut among ranks, and the rows between the sub-layers: Megatron's (arXiv:1909.08053), with sequence parallel
(arXiv:2205.05198, section 4.2.2).

Every rank has some heads and some of the MLP's width, as plain modules that are smaller: their code is what it was.
Between the sub-layers it has its rows, an equal part of all rows of a micro-batch; they are gathered where attention, the
MLP and the loss begin, and what these make, of each rank a term of a sum, is summed and scattered. What takes rows
one by one (norms, sums) need not know. Weights that are held whole have gradients that are terms of a sum, too.

Dropout on the input of a layer that is cut by columns draws as one device does where ranks draw alike; on one that is cut
by rows each rank draws for its own columns.

Shapes: B rows of a batch, S columns, T = B·S, t = T / ranks a rank's rows, h hidden.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ..parts import Cut, cuts_of
from ..run import MicroBatch, Run, blocks_of
from .vocabulary import PartOfVocabulary

# torch 2.13's names, and those of 2.11
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_COUNTED = ("num_heads", "num_attention_heads", "num_key_value_heads")


def _gathered(own_th: Tensor, group: dist.ProcessGroup) -> Tensor:
    all_th = own_th.new_empty(own_th.shape[0] * dist.get_world_size(group), *own_th.shape[1:])
    _gather(all_th, own_th.contiguous(), group=group)
    return all_th


def _scattered(term_th: Tensor, group: dist.ProcessGroup) -> Tensor:
    own_th = term_th.new_empty(term_th.shape[0] // dist.get_world_size(group), *term_th.shape[1:])
    _scatter(own_th, term_th.contiguous(), group=group)
    return own_th


class _Gather(torch.autograd.Function):
    """Own rows → all rows; of their gradient each rank has a term."""

    @staticmethod
    def forward(ctx: Any, own_th: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(own_th, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    """A term of all rows → own rows of the sum."""

    @staticmethod
    def forward(ctx: Any, term_th: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(term_th, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


class Rows:
    """The rows of the micro-batch at work, as a batch and as this rank's part: ``(B, S, h)`` and ``(1, t, h)``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.shape = torch.Size()
        """B and S."""

    def gathered(self, own_1th: Tensor) -> Tensor:
        """In the type of the products that follow."""
        kind = own_1th.device.type
        if torch.is_autocast_enabled(kind):
            own_1th = own_1th.to(torch.get_autocast_dtype(kind))
        all_th: Tensor = _Gather.apply(own_1th.flatten(0, 1), self.group)
        return all_th.view(*self.shape, -1)

    def summed(self, term_bsh: Tensor) -> Tensor:
        own_th: Tensor = _Scatter.apply(term_bsh.flatten(0, 1), self.group)
        return own_th[None]


# --- weights


def cut_weights(model: Any, place: tuple[int, int], columns: Sequence[str], rows: Sequence[str]) -> None:
    """Leave of the model, which is on meta, the part of rank ``place[0]`` of ``place[1]``: of the layers with these short
    names some outputs (``columns``) or inputs (``rows``), and some of the vocabulary."""
    for parent in blocks_of(model).modules():
        for name, layer in parent.named_children():
            if name in columns:
                _cut_columns(layer, _sections(name, parent, layer.out_features), place)
            elif name in rows:
                _cut_rows(layer, place)
        if any(name in columns for name, _ in parent.named_children()):
            _count(parent, place[1])
    for table in {id(m): m for m in (model.get_input_embeddings(), model.get_output_embeddings())}.values():
        _cut_vocabulary(table, place)


def _cut_columns(layer: Any, sections: Sequence[int], place: tuple[int, int]) -> None:
    _cut(layer, {"weight": 0, "bias": 0, "lora_B": 0}, sections, place)
    layer.out_features = layer.weight.shape[0]


def _cut_rows(layer: Any, place: tuple[int, int]) -> None:
    _cut(layer, {"weight": 1, "lora_A": 1}, [layer.in_features], place)
    layer.in_features = layer.weight.shape[1]


def _sections(name: str, parent: Any, size: Any) -> list[int]:
    """What the outputs of a layer are made of, of which each rank has a part: queries, keys and values; gate and up."""
    if name == "qkv_proj":
        keys = parent.num_key_value_heads * parent.head_dim
        return [size - 2 * keys, keys, keys]
    return [size // 2] * 2 if name == "gate_up_proj" else [size]


def _cut(module: nn.Module, dims: dict[str, int], sections: Sequence[int], place: tuple[int, int]) -> None:
    """Weights that share their storage, as tied ones do, are cut once."""
    for leaf, dim in dims.items():
        weight = module._parameters.get(leaf)
        if weight is None:
            continue
        whole = (*weight.shape[:dim], sum(sections), *weight.shape[dim + 1 :])
        cut = module.__dict__.setdefault("cuts", {})[leaf] = Cut.even(whole, dim, sections, place)
        if weight.shape == whole:
            weight.data = cut.of(weight.data).contiguous()


def _count(module: Any, ranks: int) -> None:
    """Heads as the module has them now: its own count of them, and its config's, of which it gets a copy."""
    for told in (module, copy.copy(module.config)) if hasattr(module, "config") else (module,):
        for name in _COUNTED:
            if isinstance(getattr(told, name, None), int):
                setattr(told, name, getattr(told, name) // ranks)
        if told is not module:
            module.config = told


def _cut_vocabulary(table: Any, place: tuple[int, int]) -> None:
    size = getattr(table, "num_embeddings", 0) or table.out_features
    _cut(table, {"weight": 0, "bias": 0}, [size], place)
    ((start, stop),) = cuts_of(table)["weight"].ranges
    if hasattr(table, "num_embeddings"):
        table.num_embeddings = stop - start
        if table.padding_idx is not None:
            table.padding_idx = table.padding_idx - start if start <= table.padding_idx < stop else None
    else:
        table.out_features = stop - start


# --- rows


def divide_rows(run: Run, group: dist.ProcessGroup) -> None:
    """Gather and scatter rows of the model, whose weights are cut, and sum the gradients of those that are not."""
    model, rows = run.model, Rows(group)
    for block in blocks_of(model):
        for half in block.children():
            if any(cuts_of(module) for module in half.modules()):
                half.register_forward_pre_hook(functools.partial(_before, rows), with_kwargs=True)
                half.register_forward_hook(functools.partial(_after, rows))
    model.get_decoder().register_forward_pre_hook(functools.partial(_see, rows), with_kwargs=True)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        if cut := cuts_of(table).get("weight"):  # it may be on another stage of a pipeline
            ((start, stop),) = cut.ranges
            table.vocabulary = PartOfVocabulary(start, stop, group)
            if isinstance(table, nn.Embedding):
                table.forward = _Lookup(table, rows)  # type: ignore[method-assign, assignment]
    run.loss = _Loss(run.loss, rows)
    run.world.parts.append("tensor")
    sum_terms(run, group)


def _see(rows: Rows, _decoder: nn.Module, _args: Any, kwargs: Any) -> None:
    rows.shape = kwargs["input_ids"].shape


def _before(rows: Rows, _half: nn.Module, args: Any, kwargs: Any) -> Any:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": rows.gathered(kwargs["hidden_states"])}
    return (rows.gathered(args[0]), *args[1:]), kwargs


def _after(rows: Rows, _half: nn.Module, _args: Any, out: Any) -> Any:
    return (rows.summed(out[0]), *out[1:]) if isinstance(out, tuple) else rows.summed(out)


class _Lookup:
    """Ids to own rows of the embedding: each rank looks up what of all is in its part, the others' are zeros."""

    def __init__(self, embedding: Any, rows: Rows) -> None:
        self.run, self.vocabulary, self.rows = embedding.forward, embedding.vocabulary, rows

    def __call__(self, ids_bs: Tensor) -> Tensor:
        index_bs, is_elsewhere_bs = self.vocabulary.looked_up(ids_bs)
        return self.rows.summed(self.run(index_bs).masked_fill_(is_elsewhere_bs[..., None], 0.0))


class _Loss:
    """Of all rows, which each rank needs for its part of the vocabulary."""

    def __init__(self, loss: Any, rows: Rows) -> None:
        self.loss, self.rows = loss, rows

    def __call__(self, model: Any, hidden_1th: Tensor, batch: MicroBatch) -> Tensor:
        total: Tensor = self.loss(model, self.rows.gathered(hidden_1th), batch)
        return total


def sum_terms(run: Run, group: dist.ProcessGroup) -> None:
    """What each rank has of the gradient of a weight that all hold whole is a term of a sum, which counts once in a norm."""

    model, world = run.model, run.world  # all of the run would be there for as long as its optimizer

    def complete(stepped: Mapping[Parameter, Parameter]) -> None:
        cut = {module._parameters[leaf] for module in model.modules() for leaf in cuts_of(module)}
        terms = [one for parameter, one in stepped.items() if parameter not in cut]
        asked = [
            dist.all_reduce(one.grad, group=group, async_op=True)
            for one in terms
            if one.grad is not None and one.numel()
        ]
        for one in asked:
            one.wait()
        if dist.get_rank(group):
            world.copies.update(terms)

    run.optimizer.completing.append(complete)
