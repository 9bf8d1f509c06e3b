"""What a run trains on and what is held out of it: tokens, their order, and the number of steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .batches import FromOrder
from .config import Config
from .data.order import InOrder, Order, spaced
from .data.readers import HELD_OUT, Source, open_source
from .data.tokens import TokenStore, prepare
from .errors import ConfigError, EngineError, ModelError
from .spec import resolve_model

HELD_OUT_SHARE = 20  # one of so many examples is set aside where no held-out data is named
EVALUATED = 64  # examples, evenly spaced over the held-out set: a quarter of a minute on two cores for a 135M model


@dataclass(frozen=True, slots=True)
class Data:
    """Tokens to train on and to evaluate with, their order, and the number of steps."""

    store: TokenStore
    held_out: TokenStore
    held_out_rows: tuple[int, ...]
    order: Order | InOrder
    rows: tuple[int, ...]
    """Rows of ``store`` that are trained on, which the order counts."""
    steps: int

    def batch(self, step: int) -> list[int]:
        """Rows of the store of one global batch."""
        return [self.rows[i] for i in self.order.batch(step)]

    def evaluated(self) -> list[int]:
        """Rows of the held-out store that an evaluation takes."""
        return [self.held_out_rows[i] for i in spaced(len(self.held_out_rows), EVALUATED)]

    def held_out_batches(self) -> FromOrder:
        """They as one global batch."""
        rows = self.evaluated()
        lengths, labelled = (of[rows].tolist() for of in (self.held_out.lengths, self.held_out.labelled))
        return FromOrder([range(len(rows))], lengths, labelled)

    def batches(self) -> FromOrder:
        steps = [self.batch(step) for step in range(1, self.steps + 1)]
        return FromOrder(steps, self.store.lengths.tolist(), self.store.labelled.tolist())


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a model's folder."""
    resolve_model(str(folder))  # says what is wrong with a config.json before transformers trips over it
    return read_tokenizer(folder)


def read_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of any folder that has one: an adapter's has no config.json beside it."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EngineError("training needs transformers", hint="pip install 'finefit[train]'") from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a library raises on a file it cannot read: the file is the user's
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        hint = "tokenizer.json and tokenizer_config.json are missing, damaged, or of a newer transformers"
        raise ModelError(f"the tokenizer cannot be read: {first}", where=str(folder), hint=hint) from error


def read_data(config: Config, tokenizer: Any) -> Data:
    """Tokenise (or take from the cache) what is trained on and what is held out."""
    if config.data is None:
        raise ConfigError("no data is named", hint="finefit train MODEL DATA, or data: in the run file")
    at = config.train

    def store_of(source: Source) -> TokenStore:
        return prepare(source, tokenizer, max_length=at.max_length, too_long=at.too_long)

    store = store_of(open_source(config.data, bad_rows=at.bad_rows))
    named = config.eval_data or (HELD_OUT if config.data == HELD_OUT.partition(":")[0] else None)
    held_out = store_of(open_source(named, bad_rows=at.bad_rows)) if named else store
    aside: tuple[int, ...] = () if named else tuple(range(0, len(store), HELD_OUT_SHARE))
    if len(aside) == len(store):
        aside = ()  # too few examples to set any aside: they are evaluated on what they learn
    held_out_rows = aside or tuple(range(len(held_out)))
    rows = tuple(sorted(set(range(len(store))) - set(aside)))
    size = min(at.global_batch_size, len(rows))
    order = InOrder(len(rows), size) if at.order == "as_given" else Order(len(rows), size, config.seed)
    return Data(store, held_out, held_out_rows, order, rows, at.steps or order.steps(at.epochs))
