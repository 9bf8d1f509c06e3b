"""The part of the vocabulary whose logits a rank has, and what of a softmax over all of it takes the others.

Each rank's log-sum-exp becomes that of all, and a token's logit is the rank's that has it (arXiv:1909.08053, section 3:
numbers of a row are exchanged, never its logits).

Shapes: C rows, v the rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


class Vocabulary:
    """All of it is here."""

    def log_softmax(self, logits_cv: Tensor) -> Tensor:
        """In place: each row is read before it is written."""
        return torch.log_softmax(logits_cv, -1, out=logits_cv)

    def picked(self, logp_cv: Tensor, label_c1: Tensor) -> Tensor:
        """Each row's value of its label, 0 where another rank has it."""
        return logp_cv.gather(1, label_c1)

    def take_one(self, dlogits_cv: Tensor, label_c1: Tensor) -> None:
        """Subtract 1 from each row's value of its label."""
        dlogits_cv.scatter_add_(1, label_c1, torch.full_like(label_c1, -1, dtype=dlogits_cv.dtype))

    def total(self, loss: Tensor) -> Tensor:
        """Of all ranks' parts of a loss."""
        return loss

    def cross_entropy(self, logits_cv: Tensor, label_c: Tensor) -> Tensor:
        """Summed over the rows whose label is not -100."""
        return F.cross_entropy(logits_cv, label_c, ignore_index=-100, reduction="sum")


class PartOfVocabulary(Vocabulary):
    """Tokens from ``start`` to ``stop``, those between them and others' on the ranks of ``group``."""

    def __init__(self, start: int, stop: int, group: dist.ProcessGroup) -> None:
        self.start, self.stop, self.group = start, stop, group

    def log_softmax(self, logits_cv: Tensor) -> Tensor:
        largest_c1 = logits_cv.amax(-1, keepdim=True)
        logp_cv = torch.log_softmax(logits_cv, -1, out=logits_cv)
        own_c1 = largest_c1.sub_(logp_cv.amax(-1, keepdim=True))  # this part's log-sum-exp
        return logp_cv.add_(own_c1 - self._of_all(own_c1))

    def _of_all(self, own_c1: Tensor) -> Tensor:
        """The log-sum-exp of all parts."""
        top_c1 = own_c1.clone()
        dist.all_reduce(top_c1, dist.ReduceOp.MAX, self.group)
        sum_c1 = (own_c1 - top_c1).exp_()
        dist.all_reduce(sum_c1, group=self.group)
        return sum_c1.log_().add_(top_c1)

    def picked(self, logp_cv: Tensor, label_c1: Tensor) -> Tensor:
        index_c1, is_here_c1 = self._here(label_c1)
        return logp_cv.gather(1, index_c1).mul_(is_here_c1)

    def take_one(self, dlogits_cv: Tensor, label_c1: Tensor) -> None:
        index_c1, is_here_c1 = self._here(label_c1)
        dlogits_cv.scatter_add_(1, index_c1, is_here_c1.to(dlogits_cv.dtype).neg_())

    def _here(self, label: Tensor) -> tuple[Tensor, Tensor]:
        """Labels as rows of this part, and whether they are in it; 0 where not."""
        is_here = (label >= self.start) & (label < self.stop)
        return (label - self.start).mul_(is_here), is_here

    def total(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss, group=self.group)
        return loss

    def cross_entropy(self, logits_cv: Tensor, label_c: Tensor) -> Tensor:
        total: Tensor = _CrossEntropy.apply(logits_cv, label_c, self)
        return total

    def looked_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids as rows of this part, 0 where they are in another, and whether they are."""
        index, is_here = self._here(ids)
        return index, is_here.logical_not_()


class _CrossEntropy(torch.autograd.Function):
    """Sum over the rows with a label, from this part's logits; keeps their softmax in fp32."""

    @staticmethod
    def forward(ctx: Any, logits_cv: Tensor, label_c: Tensor, vocabulary: Vocabulary) -> Tensor:
        logp_cv = vocabulary.log_softmax(logits_cv.float().clone())
        ctx.save_for_backward(logp_cv, label_c)
        ctx.vocabulary, ctx.dtype = vocabulary, logits_cv.dtype
        is_labelled_c = label_c >= 0
        picked_c = vocabulary.picked(logp_cv, label_c.clamp(min=0)[:, None]).squeeze(1)
        return vocabulary.total(-(picked_c * is_labelled_c).sum())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logp_cv, label_c = ctx.saved_tensors
        dlogits_cv = logp_cv.exp()
        ctx.vocabulary.take_one(dlogits_cv, label_c.clamp(min=0)[:, None])
        return dlogits_cv.mul_((label_c >= 0)[:, None] * grads[0]).to(ctx.dtype), None, None


_WHOLE = Vocabulary()


def vocabulary_of(head: nn.Module) -> Vocabulary:
    """Of which a head, or an embedding, has the weights."""
    found: Vocabulary = getattr(head, "vocabulary", _WHOLE)
    return found
