"""Context parallel: the tokens of every micro-batch are divided among ranks (DeepSpeed-Ulysses, arXiv:2309.14509).

Each rank has a contiguous share of a row, of its labels too. Only attention looks at other tokens: there an all-to-all
gives each rank all tokens of some heads, and another one takes them back, on a CPU as on a GPU; ring attention would need
kernels that only a GPU has. Weights are the same on all ranks, so gradients are summed over them as over replicas, and
ZeRO divides states among them as well. Declines heads that do not go evenly into ranks.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..data.micro import ALIGNMENT
from ..layout import Layout
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..nn.exchanged import Exchange
    from ..run import MicroBatch, Run


@dataclass(frozen=True, slots=True)
class ContextParallel(Technique):
    name = "context_parallel"
    exact = True

    ranks: int

    def rewrite(self, layout: Layout) -> Layout:
        model, mesh, n = layout.model, layout.mesh, self.ranks
        if not model.packs:
            raise Unsuitable(f"the attention of '{model.family}' models is their own and takes whole rows")
        if mesh.tensor > 1 or mesh.stages > 1:
            raise Unsuitable("context parallel is planned with data parallel and sharded ranks only")
        if ALIGNMENT % n:
            raise Unsuitable(f"rows are of {ALIGNMENT} tokens or a multiple, which do not divide among {n} devices")
        if model.num_attention_heads % n:
            raise Unsuitable(f"{model.num_attention_heads} heads do not divide among {n} devices")
        if model.num_key_value_heads % n and n % model.num_key_value_heads:
            raise Unsuitable(f"{model.num_key_value_heads} key/value heads do not go evenly into {n} devices")
        return replace(layout, mesh=replace(mesh, context=n))

    def apply(self, run: "Run") -> None:
        from ..nn.reduced import Replicated

        run.optimizer.home = Replicated(run.world.group("replicas"))

    def divide(self, run: "Run") -> None:
        """What makes micro-batches is whole by now: of each this rank takes its share."""
        from ..nn.exchanged import Exchange

        def seen() -> None:
            run.evidence["exchanges"] = run.evidence.get("exchanges", 0) + 1

        group, whole = run.world.group("context"), run.collate
        exchange = Exchange(group, seen)
        run.collate = lambda examples: share(whole(examples), exchange)

    def describe(self) -> str:
        return f"the tokens of every micro-batch divided among {self.ranks} devices, the heads in attention"

    def setting(self) -> str:
        return str(self.ranks)

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        if (ranks := run.world.mesh.context) != self.ranks:
            raise NotAsPlanned(f"context_parallel: {ranks} ranks share tokens, not {self.ranks}")
        depth, steps = run.model.config.num_hidden_layers, run.evidence.get("micro_steps", 0)
        if (seen := run.evidence.get("exchanges", 0)) < depth * steps:
            raise NotAsPlanned(
                f"context_parallel: {seen} exchanges in {steps} steps of {depth} blocks: some saw a share only"
            )


def share(whole: "MicroBatch", exchange: "Exchange") -> "MicroBatch":
    """This rank's tokens of a micro-batch, in one row, and the labels of these; the first rank counts for all."""
    from ..run import filled

    each = whole.ids_bs.numel() // exchange.ranks
    start = exchange.rank * each
    ids_1u, position_1u = (t.reshape(1, -1)[:, start : start + each] for t in (whole.ids_bs, whole.position_bs))
    row_l = whole.row_r[: len(whole.label_l)]
    mine_l = (row_l >= start) & (row_l < start + each)
    return replace(
        whole, ids_bs=ids_1u.clone(), position_bs=position_1u.clone(), row_r=filled(row_l[mine_l] - start),
        label_l=whole.label_l[mine_l], tokens=whole.tokens * (exchange.rank == 0), exchange=exchange,
    )  # fmt: skip
