"""Vocabulary head and cross-entropy in one, in chunks of labelled tokens: full logits never exist, forward or backward.

In chat data most tokens are not labelled, so most of the head's work and all of the T·V logits go. A head's bias, a
factor on the logits and soft-capping are applied. Exact: the same sum in another order. Declines label smoothing.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..layout import Layout
from .base import NotAsPlanned, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ..ledger import Ledger
    from ..run import MicroBatch, Run


@dataclass(frozen=True, slots=True)
class FusedLoss(Technique):
    name = "fused_loss"
    exact = True

    chunk: int = 256
    """Labelled tokens whose logits exist at once."""

    def rewrite(self, layout: Layout) -> Layout:
        return replace(layout, loss_chunk=self.chunk).with_word("fused_loss")

    def apply(self, run: "Run") -> None:
        run.loss = self.loss

    def loss(self, model: Any, hidden_bsh: "Tensor", batch: "MicroBatch") -> "Tensor":
        import torch

        from ..nn.chunked_loss import ChunkedCrossEntropy, Logits
        from ..nn.in_fp32 import is_island

        hidden_rh = hidden_bsh.flatten(0, 1).index_select(0, batch.row_r)
        kind = hidden_rh.device.type
        head = model.get_output_embeddings()
        form = Logits.of(model.config.get_text_config(), head)
        if is_island(head):
            hidden_rh = hidden_rh.float()
        elif torch.is_autocast_enabled(kind):
            hidden_rh = hidden_rh.to(torch.get_autocast_dtype(kind))
        weight, bias = head.weight, head.bias
        if not torch.is_grad_enabled():  # or the function would form their gradients: it asks the tensor, not the mode
            weight, bias = weight.detach(), bias if bias is None else bias.detach()
        with torch.autocast(kind, enabled=False):
            total: Tensor = ChunkedCrossEntropy.apply(hidden_rh, weight, bias, batch.label_l, self.chunk, form)
        return total

    def describe(self) -> str:
        return f"loss over labelled tokens only, {self.chunk} at a time; full logits never exist"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        text, ranks = run.model.config.get_text_config(), run.world.mesh.tensor
        vocab = -(-text.vocab_size // ranks)
        if vocab == text.hidden_size:
            return  # a rank's logits look like its hidden states
        rows = max((e.shape[0] for e in ledger.entries if e.shape[-1:] == (vocab,) and len(e.shape) == 2), default=0)
        if rows > self.chunk:
            raise NotAsPlanned(f"fused_loss: logits of {rows} rows existed at once, not {self.chunk}")
