"""Parts that stay in fp32 where the run has fewer bits: weights and arithmetic of norms, routers or the head, or by name.

What a name means: ``norms``, ``router`` (of a mixture of experts), ``head`` (of the vocabulary; the embedding where that is
the same weight); anything else is the end of a module's name in a block or outside (``q_norm``, ``mlp.gate``, ``*_proj``).
The loss is summed in fp32 without being asked. As transformers' ``_keep_in_fp32_modules`` and LLaMA-Factory's
``upcast_layernorm``. Never chosen by the planner. Declines weights that are quantised.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..layout import Layout, ParamGroup
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from torch import nn

    from ..ledger import Ledger
    from ..run import Run

RULES = ("norms", "router", "head")
_ROUTERS = ("gate", "router", "wg")


@dataclass(frozen=True, slots=True)
class Fp32Islands(Technique):
    name = "fp32_islands"
    exact = False

    parts: tuple[str, ...] = ()
    """Of ``RULES``, or names."""

    def rewrite(self, layout: Layout) -> Layout:
        if layout.mesh.devices > 1:
            raise Unsuitable("fp32_islands are planned for one device")
        modules = {_module(group.name) for group in layout.groups}
        chosen = set(self._chosen(modules, {_module(g.name) for g in layout.groups if _is_head(g, layout)}))
        if packed := sorted(g.name for g in layout.groups if _module(g.name) in chosen and g.bits < 16):
            raise Unsuitable(f"{packed[0]} is quantised: it cannot be in fp32")
        groups = (replace(g, bits=32, is_island=True) if _module(g.name) in chosen else g for g in layout.groups)
        return replace(layout, groups=tuple(groups)).with_word(f"fp32={','.join(self.parts)}")

    def _chosen(self, modules: Iterable[str], heads: set[str]) -> Iterator[str]:
        """Of modules by name those that are meant; Unsuitable where a part is none of them."""
        known = tuple(modules)
        for part in self.parts:
            found = heads if part == "head" else {name for name in known if _is_meant(name, part)}
            if not found:
                ends = sorted({name.rpartition(".")[2] for name in known})
                raise Unsuitable(f"no part of this model is '{part}' of memory.fp32_islands; it has {', '.join(ends)}")
            yield from found

    def apply(self, run: "Run") -> None:
        import torch

        from ..nn.in_fp32 import island

        head = run.model.get_output_embeddings()
        for module in self._modules(run.model):
            own = list(module.parameters(recurse=False))
            of_ids = isinstance(module, torch.nn.Embedding)
            leaves = torch.float32 if module is head else own[0].dtype if of_ids else None
            island(module, leaves)
            for parameter in own:
                parameter.data = parameter.data.float()

    def _modules(self, model: Any) -> "list[nn.Module]":
        """In the model's order; where modules share a weight, all of them."""
        from ..run import blocks_of

        within = {id(module): f"block.{name}" for block in blocks_of(model) for name, module in block.named_modules()}
        with_weights = [
            (within.get(id(module), name), module)
            for name, module in model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        weight = model.get_output_embeddings().weight
        heads = {name for name, module in with_weights if any(p is weight for p in module.parameters(recurse=False))}
        chosen = set(self._chosen([name for name, _ in with_weights], heads))
        return [module for name, module in with_weights if name in chosen]

    def describe(self) -> str:
        said = {"norms": "norms", "router": "the router", "head": "the vocabulary head"}
        return f"{', '.join(said.get(part, part) for part in self.parts)} in fp32"

    def setting(self) -> str:
        return ",".join(self.parts)

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        import torch

        from ..nn.in_fp32 import is_island

        modules = self._modules(run.model)
        narrow = [p for m in modules for p in m.parameters(recurse=False) if p.dtype != torch.float32]
        if narrow or not all(map(is_island, modules)):
            raise NotAsPlanned(f"fp32_islands: {len(narrow)} weights of {len(modules)} islands are not in fp32")


def _module(parameter: str) -> str:
    """Whose weight it is, by the parameter's name."""
    return parameter.rpartition(".")[0]


def _is_meant(module: str, part: str) -> bool:
    last = module.rpartition(".")[2]
    if part == "norms":
        return "norm" in last or last.startswith("ln")
    if part == "router":
        return any(word in _ROUTERS for word in module.split("."))
    return fnmatchcase(module, part) or fnmatchcase(module, f"*.{part}")


def _is_head(group: ParamGroup, layout: Layout) -> bool:
    """A head that shares its weight with the embedding may still have a bias."""
    model = layout.model
    shared = model.tie_word_embeddings and group.role == "embedding"
    return group.name.startswith("lm_head.") or (shared and group.numel == model.vocab_size * model.hidden_size)
