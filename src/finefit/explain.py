"""Why this plan and not one beside it: its neighbours, each judged, and the last links of its chain of reasons.

A neighbour differs in one thing: a block more or less checkpointed, the next larger or smaller micro-batch, one technique
off, another precision, another method. Each needs too much, fits and is slower, is no better, or is not the plan's to
choose. Declines to trace: what no coefficients are at hand for is told without numbers.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast, get_args

from .candidates import (
    ADAPTED,
    METHODS,
    Candidate,
    Method,
    Question,
    candidate,
    fewest_blocks,
    rewrite,
    splits,
    techniques_of,
)  # fmt: skip
from .coefficients import is_traced
from .ladder import single, turned_on
from .mesh import Mesh
from .meshes import mesh_of
from .plan import Neighbour, Plan, Verdict
from .search import SLOWER, best_of, best_over
from .spec import PrecisionKind
from .techniques import Accumulation, Checkpointing, Precision, QuantizedBase, Unsuitable
from .techniques.quantized_base import Bits
from .units import format_bytes

_OFF = (("packing", "packing"), ("fused_ops", "fused_ops"), ("fused_loss", "loss_chunk"))  # technique, its pin
_OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor")  # those beside a plan that trains all weights
_QUALITY = "a choice of quality, so yours"


def explained(question: Question, plan: Plan) -> Plan:
    """``plan``, the answer to ``question``, with its neighbours and with why it stops where it does."""
    on = turned_on(plan.techniques, question.job, question.hardware.kind)
    asked = replace(question, job=replace(question.job, method=cast(Method, plan.method)), turned_on=on)
    asked = asked.over(mesh_of(plan.techniques))
    beside = _Beside(asked, plan)
    near = (
        *beside.blocks(), *beside.sizes(), *beside.meshes(question), *beside.without(), *beside.turned_on(), *beside.precisions(), *beside.bits(),
        *beside.optimizers(),
        *_methods(question, plan),
    )  # fmt: skip
    return replace(plan, neighbours=tuple(near), reasons=(*plan.reasons, *_enough(question, plan, beside)))


def _limit(question: Question, plan: Plan) -> int:
    """What the search kept to: the aim if the plan is within it."""
    aim = question.budget.aim_bytes
    return aim if plan.predicted.total_bytes <= aim else question.budget.limit_bytes


def _enough(question: Question, plan: Plan, beside: "_Beside") -> Iterator[str]:
    limit, depth = format_bytes(_limit(question, plan)), question.model.num_hidden_layers
    uses = f"{format_bytes(plan.predicted.total_bytes)} of {limit}"
    if question.job.pin("checkpointing") is None:
        if beside.k:
            fewer = max(beside.k - beside.question.mesh.stages, fewest_blocks(beside.question))  # every stage one less
            less = format_bytes(beside.at(fewer).predicted.total_bytes)
            yield f"checkpointing {beside.k} of {depth} blocks is enough: {uses}; {fewer} would need {less}"
        else:
            yield f"no block has to be checkpointed: {uses}"
    whole = question.hardware.memory_bytes
    share = 100 * (1 - _limit(question, plan) / whole)
    yield f"headroom: {share:.3g} % of the device's {format_bytes(whole)} is left free (memory.budget={question.budget.text})"


def judged(candidate: Candidate, plan: Plan, limit: int) -> tuple[Verdict, str]:
    """What keeps ``candidate`` from being the plan, by its own numbers."""
    total, speed = candidate.predicted.total_bytes, candidate.tokens_per_s
    if total > limit:
        return "too large", f"needs {format_bytes(total)} of {format_bytes(limit)}"
    more, against = total - plan.predicted.total_bytes, f"{speed:,.0f} against {plan.tokens_per_s:,.0f} tokens/s"
    if more == 0 and speed == plan.tokens_per_s:
        return "no better", f"makes no difference: {speed:,.0f} tokens/s in the same memory"
    if speed < plan.tokens_per_s:
        return "slower", f"fits and is slower: {against}"
    if speed <= SLOWER * plan.tokens_per_s and more >= 0:
        return "no better", f"fits and is hardly faster: {against}, for {format_bytes(more)} more"
    return "no better", f"fits, as good by these figures: {against}"


class _Beside:
    """Neighbours of one plan that differ in how memory is used."""

    def __init__(self, question: Question, plan: Plan) -> None:
        self.question, self.plan, self.limit = question, plan, _limit(question, plan)
        split, blocks = plan.technique("accumulation"), plan.technique("checkpointing")
        if not isinstance(split, Accumulation):
            raise TypeError("a plan says how a batch is split")
        self.size, self.tokens = split.micro_batch_size, split.micro_batch_tokens
        self.k = blocks.blocks if isinstance(blocks, Checkpointing) else 0
        self.work = question.work(self.size, self.tokens)

    def at(self, blocks: int) -> Candidate:
        return candidate(self.question, self.size, self.tokens, self.work, blocks)

    def blocks(self) -> Iterator[Neighbour]:
        depth = self.question.model.num_hidden_layers
        for k in (self.k - 1, self.k + 1):
            if fewest_blocks(self.question) <= k <= depth:
                yield self._judged(f"{k} of {depth} blocks checkpointed", self.at(k), self._fixed("checkpointing"))

    def sizes(self) -> Iterator[Neighbour]:
        """The next larger and the next smaller micro-batch, all else the same."""
        pins = ("micro_batch_size", "micro_batch_tokens")
        fixed = next((self._fixed(pin) for pin in pins if self.question.job.pin(pin)), "")
        ways = sorted(splits(self.question))
        at = ways.index((self.size, self.tokens)) if (self.size, self.tokens) in ways else len(ways)
        for i, word in ((at + 1, "larger"), (at - 1, "smaller")):
            if 0 <= i < len(ways):
                size, tokens = ways[i]
                found = candidate(self.question, size, tokens, self.question.work(size, tokens), self.k)
                most = f"{tokens} tokens" if tokens else f"{size} examples"
                yield self._judged(f"a {word} micro-batch, {most}", found, fixed)

    def meshes(self, whole: Question) -> Iterator[Neighbour]:
        """The devices divided otherwise in one degree, each with the best it would do; ``whole`` is not divided yet."""
        job, chosen = replace(whole.job, method=cast(Method, self.plan.method)), self.question.mesh
        for mesh in whole.meshes():
            if not _is_near(mesh, chosen):
                continue
            if found := best_over(replace(whole, job=job), mesh, self.limit):
                yield self._judged(mesh.says(), found, "")

    def without(self) -> Iterator[Neighbour]:
        """One of the techniques that are on unless switched off, off."""
        for name, pin in _OFF:
            job = self.question.job
            if self.plan.technique(name) is None:
                yield Neighbour(f"with {name}", "not allowed", f"memory.{pin} is switched off by you")
                continue
            off = "0" if pin == "loss_chunk" else "false"
            other = replace(self.question, job=replace(job, pins=(*(p for p in job.pins if p[0] != pin), (pin, off))))
            yield self._other(f"without {name}", other, "it only saves, and is exact", self._fixed(pin))

    def turned_on(self) -> Iterator[Neighbour]:
        """Each exact technique that pays in time for memory, on where it is off."""
        pairs = list(single(self.question.hardware.kind))
        for pair in pairs:
            key, value = pair
            if any(key == on for t in self.plan.techniques for on, _ in t.turned_on()):
                continue
            says = f"with {key}={value}" if sum(key == other for other, _ in pairs) > 1 else f"with {key}"
            if self.question.job.pin(key) is not None:
                yield Neighbour(says, "not allowed", self._fixed(key))
                continue
            other = replace(self.question, turned_on=(*self.question.turned_on, pair))
            yield self._other(says, other, "it is exact and takes time", "")

    def precisions(self) -> Iterator[Neighbour]:
        has = self.plan.technique("precision")
        for kind in get_args(PrecisionKind):
            if not isinstance(has, Precision) or kind == has.kind:
                continue
            if kind == "fp16" and self.question.job.method not in ADAPTED:
                continue
            if kind.startswith("bf16") and not self.question.hardware.supports_bf16:
                yield Neighbour(f"precision {kind}", "not allowed", "the device cannot compute in bf16")
                continue
            other = replace(self.question, job=replace(self.question.job, precision=kind))
            why = f"{_QUALITY} (memory.precision={kind})"
            yield self._other(f"precision {kind}", other, why, why)

    def bits(self) -> Iterator[Neighbour]:
        """A quantised base in more bits or fewer."""
        has = self.plan.technique("quantized_base")
        if not isinstance(has, QuantizedBase):
            return
        job = self.question.job
        for bits in sorted({*get_args(Bits)} - {has.bits}, reverse=True):
            pins = (*(pin for pin in job.pins if pin[0] != "qlora.bits"), ("qlora.bits", str(bits)))
            why = f"{_QUALITY} (qlora.bits={bits})"
            yield self._other(f"a base in {bits} bits", replace(self.question, job=replace(job, pins=pins)), why, why)

    def optimizers(self) -> Iterator[Neighbour]:
        """What other optimizers would need, where all weights train and their states are much of what is held."""
        job = self.question.job
        if job.method != "full":
            return
        chosen = job.pin("optimizer") or "adamw"
        for kind in _OPTIMIZERS:
            if kind != chosen:
                pins = (*(p for p in job.pins if p[0] != "optimizer"), ("optimizer", kind))
                why = f"{_QUALITY} (train.optimizer={kind})"
                yield self._other(f"optimizer {kind}", replace(self.question, job=replace(job, pins=pins)), why, why)

    def _other(self, says: str, question: Question, why: str, fixed: str) -> Neighbour:
        """The same split and blocks for a changed question; ``why`` stands where there are no coefficients."""
        work = question.work(self.size, self.tokens)
        techniques = techniques_of(question, self.size, self.tokens, work, self.k)
        try:
            layout = rewrite(question.model, work.largest[0], techniques)
        except Unsuitable as error:
            return Neighbour(says, "not allowed", str(error))
        if not is_traced(layout):
            return Neighbour(says, "not allowed" if fixed else "no better", fixed or why)
        return self._judged(says, candidate(question, self.size, self.tokens, work, self.k), fixed)

    def _fixed(self, pin: str) -> str:
        said = self.question.job.pin(pin)
        return f"you said memory.{pin}={said}" if said is not None else ""

    def _judged(self, says: str, found: Candidate, fixed: str) -> Neighbour:
        verdict, why = judged(found, self.plan, self.limit)
        if fixed:
            verdict, why = "not allowed", f"{fixed}; it {why}"
        return Neighbour(says, verdict, why, found.predicted.total_bytes, found.tokens_per_s)


def _is_near(mesh: Mesh, chosen: Mesh) -> bool:
    """Differs in what is divided among data-parallel ranks, or in one degree of the others and nothing else."""
    degrees = ((mesh.tensor, chosen.tensor), (mesh.stages, chosen.stages), (mesh.context, chosen.context))
    if all(one == other for one, other in degrees):
        return mesh != chosen
    near = all(one in (other // 2, other, other * 2) for one, other in degrees)
    return near and sum(one != other for one, other in degrees) == 1 and mesh.stage == chosen.stage


def _methods(question: Question, plan: Plan) -> Iterator[Neighbour]:
    """The other methods, each with the best plan it would have: what is trained is the user's."""
    limit = format_bytes(_limit(question, plan))
    for method in METHODS:
        if method == plan.method:
            continue
        says, total, speed = f"method {method}", *_outcome(question, method)
        if not total:
            yield Neighbour(says, "not allowed", "this model cannot be planned so here")
        elif total > _limit(question, plan):
            yield Neighbour(says, "too large", f"needs {format_bytes(total)} of {limit}", total, speed)
        else:
            order = f"auto takes {plan.method} before it" if question.job.method == "auto" else _QUALITY
            why = f"{order}: {format_bytes(total)}, {speed:,.0f} tokens/s"
            yield Neighbour(says, "not allowed", why, total, speed)


def _outcome(question: Question, method: Method) -> tuple[int, float]:
    """Bytes and tokens per second of the best plan with ``method``, of the smallest where none fits; zeros if unknown."""
    asked = replace(question, job=replace(question.job, method=method))
    size, tokens = next(iter(splits(asked)))
    work = asked.work(size, tokens)
    try:
        both = [techniques_of(asked, size, tokens, work, k) for k in (0, asked.model.num_hidden_layers)]
        if all(is_traced(rewrite(asked.model, work.largest[0], techniques)) for techniques in both):
            return best_of(asked)
    except Unsuitable:
        pass
    return 0, 0.0
