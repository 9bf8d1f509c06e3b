"""What fits a device: for each catalogued model and method the longest sequence it could be trained on, and how fast.

One example to a micro-batch, as many blocks checkpointed as needed and no more, the default settings else. Lengths are
multiples of 512 up to the model's own positions, found by bisection: what is needed grows with the length. Of several
devices each has a shard of everything (ZeRO-3) and examples of its own. Torch-free:
a model, or a method of it, that would need a trace first is told as unknown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import catalog
from .batches import Uniform
from .candidates import METHODS, Candidate, Method, Question, candidate, rewrite, techniques_of
from .coefficients import is_traced, shipped
from .errors import ConfigError, did_you_mean
from .mesh import Mesh
from .search import DEFAULT_BUDGET
from .spec import HardwareSpec, JobSpec, ModelSpec
from .techniques import Unsuitable
from .units import parse_budget

STEP = 512  # tokens
USUAL = 2048  # the length at which speeds are compared
EXAMPLES = 16  # of a step: train.global_batch_size where nothing is said


@dataclass(frozen=True, slots=True)
class At:
    """The plan at one length: its bytes, its blocks that are checkpointed, its speed."""

    length: int
    needs_bytes: int
    checkpointed: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    """``longest`` None: not even 512 tokens fit, or ``why`` says why it is not known or, where it is not ``possible``,
    why the method does not take this model. ``usual`` is at 2,048 tokens."""

    model: str
    hub_id: str
    parameters: int
    context: int
    method: str
    longest: At | None = None
    usual: At | None = None
    why: str = ""
    possible: bool = True


def fits(hardware: HardwareSpec, methods: Sequence[Method] = METHODS, word: str = "") -> dict[str, Any]:
    """The device, what of it may be used, and a row for each model (with ``word`` in its name) and method."""
    budget = parse_budget(DEFAULT_BUDGET[hardware.kind], hardware.memory_bytes)
    mesh = Mesh(shards=hardware.count, stage=3) if hardware.count > 1 else Mesh()
    rows = [asdict(_fit(model, Question(spec, hardware, JobSpec(method=method, global_batch_size=EXAMPLES * mesh.data),
                                        Uniform(EXAMPLES, STEP), budget, mesh)))
            for model, spec in _models(word) for method in methods]  # fmt: skip
    return {
        "device": hardware.says, "memory_bytes": hardware.memory_bytes, "budget_bytes": budget.limit_bytes,
        "methods": list(methods), "rows": rows,
    }  # fmt: skip


def _models(word: str) -> Iterator[tuple[str, ModelSpec]]:
    """Every main model of a family whose coefficients are shipped, smallest first; ConfigError where no name has it."""
    families, wanted = shipped(), catalog.plain_name(word)
    named = [(name, model) for name, model, _ in catalog.main_models() if wanted in catalog.plain_name(name)]
    if not named:
        names = [name for name, _, _ in catalog.main_models()]
        hint = did_you_mean(word, names) or did_you_mean(word.rpartition("/")[2], names)
        raise ConfigError(
            f"no name among the catalogue's models has '{word}' in it",
            hint=hint or "finefit catalog models lists all; finefit plan takes any model",
        )
    known = [(name, model) for name, model in named if model.config["model_type"] in families]
    if not known:
        hint = f"finefit plan {named[0][0]} traces it"
        raise ConfigError(f"of {named[0][0]} nothing is known without a trace", hint=hint)
    found = [(name, ModelSpec.from_config(model.config, model.name)) for name, model in known]
    return iter(sorted(found, key=lambda row: row[1].num_parameters))


def _fit(name: str, question: Question) -> Fit:
    model = question.model
    fit = Fit(name, model.name, model.num_parameters, model.max_position_embeddings, question.job.method)
    try:
        is_known = _is_known(question)
    except Unsuitable as error:
        return replace(fit, why=str(error), possible=False)
    if not is_known:
        return replace(fit, why="not traced yet: finefit plan traces it")
    longest = _longest(question)
    if not longest:
        return fit
    usual = _at(question, USUAL) if USUAL <= longest else None
    return replace(fit, longest=_at(question, longest), usual=usual)


def _is_known(question: Question) -> bool:
    """Whether each graph that a plan of this question may have is at hand."""
    work = question.batches.work(1, 0, False)
    return is_traced(rewrite(question.model, work.largest[0], techniques_of(question, 1, 0, work, 0)))


def _longest(question: Question) -> int:
    """Tokens of the longest sequence that fits with every block checkpointed; 0 where none does."""
    depth, positions = question.model.num_hidden_layers, question.model.max_position_embeddings

    def does(length: int) -> bool:
        return _candidate(question, length, depth).predicted.total_bytes <= question.budget.limit_bytes

    low, high = 0, positions // STEP + 1  # of STEP tokens: low fits, high does not or has no position
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does(middle * STEP) else (low, middle)
    return low * STEP


def _at(question: Question, length: int) -> At:
    """With the fewest blocks checkpointed that fit: the peak falls with every one."""
    low, high = -1, question.model.num_hidden_layers  # low does not fit, high does
    found = _candidate(question, length, high)
    while high - low > 1:
        middle = (low + high) // 2
        tried = _candidate(question, length, middle)
        if tried.predicted.total_bytes <= question.budget.limit_bytes:
            high, found = middle, tried
        else:
            low = middle
    return At(length, found.predicted.total_bytes, high, found.tokens_per_s)


def _candidate(question: Question, length: int, blocks: int) -> Candidate:
    work = Uniform(EXAMPLES, length).work(1, 0, False)
    return candidate(question, 1, 0, work, blocks)
