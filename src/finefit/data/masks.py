"""One example to token ids and the mask of tokens that are trained: every answer and the token that ends it.

No single way works for all chat templates, so three are tried, the surest first:

1. *markers*: the template says itself what is generated (``{% generation %}``), as transformers reads it;
2. *prefix*: the conversation before an answer, with the generation prompt, must begin the whole conversation; what
   follows it is what the model will have to write;
3. *sentinel*: the conversation with each answer replaced by a unique word shows what stands around the answers.

If none of them is certain, the conversation is refused: guessing trains on the prompt, or on nothing. Text is always
tokenised once and whole, and spans of characters are mapped to tokens by offsets, so ids are those of inference.
The end-of-turn token is always trained (a model without it never stops), the line break after it never.
Declined: tokenizers without offsets, and adding special tokens to a chat (templates write their own).
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from finefit.data.formats import Example, Message
from finefit.errors import DataError

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*$")

Span = tuple[int, int]  # characters, end exclusive


class Tokenizer(Protocol):
    """What is used of a transformers fast tokenizer."""

    chat_template: Any
    eos_token: str | None
    is_fast: bool
    added_tokens_encoder: Mapping[str, int]
    backend_tokenizer: Any

    def __call__(self, text: Any, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def decode(self, token_ids: Any, **options: Any) -> Any: ...


class Encoded(NamedTuple):
    """``mask[t]`` is 1 where token ``t`` is a target; the first token never is, nothing comes before it."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]


class Found(NamedTuple):
    """Where an answer is; ``closed`` if its end-of-turn token is already inside."""

    start: int
    end: int
    closed: bool


class Rendered(NamedTuple):
    text: str
    spans: tuple[Span, ...]
    special: bool  # whether the tokenizer adds its own tokens: for plain text, never for a chat


class _Uncertain(Exception):
    """This way cannot tell where the answers are; the next one is asked."""


class Masker:
    """Encodes examples for one tokenizer. ``methods`` counts which way found the answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                "this model's tokenizer cannot say which characters a token stands for",
                hint="use a model folder with a tokenizer.json",
            )
        self._tokenizer = tokenizer
        self.methods: Counter[str] = Counter()
        self._marked = "{% generation" in re.sub(r"\{%[-+]?\s*", "{% ", str(tokenizer.chat_template))
        # Gemma keeps runs of blanks and HTML among its added tokens: a run of blanks never ends a turn.
        tokens = {token for token in [*tokenizer.added_tokens_encoder, tokenizer.eos_token] if token and token.strip()}
        alternatives = "|".join(re.escape(token) for token in sorted(tokens, key=lambda token: (-len(token), token)))
        self._turn_end = re.compile(rf"\s*(?:{alternatives or '(?!)'})")

    def encode(self, examples: Sequence[Example]) -> list[Encoded]:
        """Ids and masks of ``examples``, in their order."""
        return self.tokenized([self.render(example) for example in examples])

    def tokenized(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        encoded: list[Encoded | None] = [None] * len(rendered)
        for special in (False, True):
            chosen = [i for i, item in enumerate(rendered) if item.special is special]
            if not chosen:
                continue
            batch = self._tokenize([rendered[i].text for i in chosen], special)
            for i, ids, offsets in zip(chosen, batch["input_ids"], batch["offset_mapping"], strict=True):
                encoded[i] = _encoded(ids, offsets, rendered[i])
        return [item for item in encoded if item is not None]

    def render(self, example: Example) -> Rendered:
        """The text of ``example`` and the spans of it that are trained."""
        if example.text:
            self.methods["text"] += 1
            end = self._tokenizer.eos_token or ""
            text = example.text if not end or example.text.endswith(end) else example.text + end
            return Rendered(text, ((0, len(text)),), special=True)
        if not self._tokenizer.chat_template:
            raise DataError(
                "this model has no chat template, so it cannot be given conversations",
                where=example.where,
                hint="use the model's -Instruct or -Chat version, or train on a 'text' column",
            )
        text = self._chat(example, example.messages)
        for name, find in (("markers", self._by_markers), ("prefix", self._by_prefix), ("sentinel", self._by_sentinel)):
            try:
                text, spans = self._ended(example, text, find(example, text))
            except _Uncertain:
                continue
            self.methods[name] += 1
            return Rendered(text, spans, special=False)
        raise DataError(
            "cannot tell the answers from the rest in what this model's chat template makes of the conversation",
            where=example.where,
            hint="give the template {% generation %} markers around the assistant's text",
        )

    def _tokenize(self, texts: list[str], special: bool) -> Any:
        options = {"add_special_tokens": special, "return_offsets_mapping": True, "return_attention_mask": False}
        return self._tokenizer(texts, padding=False, truncation=False, verbose=False, **options)

    def _chat(self, example: Example, messages: Sequence[Message], **options: Any) -> str:
        shown = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        tools = list(example.tools) or None
        try:
            return str(self._tokenizer.apply_chat_template(shown, tools=tools, tokenize=False, **options))
        except (TemplateError, TypeError) as error:
            raise DataError(
                f"this model's chat template refuses the conversation: {error}",
                where=example.where,
                hint="some templates know no system turn, no tools, or want turns to alternate strictly",
            ) from error

    def _by_markers(self, example: Example, text: str) -> list[Found]:
        if not self._marked:
            raise _Uncertain
        shown = [{key: value for key, value in message.items() if key != "weight"} for message in example.messages]
        marked = self._tokenizer.apply_chat_template(
            shown, tools=list(example.tools) or None, return_dict=True, return_assistant_tokens_mask=True
        )
        own = self._tokenize([text], special=False)
        trained = np.asarray(marked["assistant_masks"], dtype=np.int8)
        if list(marked["input_ids"]) != list(own["input_ids"][0]) or not trained.any():
            raise _Uncertain  # an all-zero mask is a known fault of marked templates: better to look ourselves
        edges = np.flatnonzero(np.diff(np.concatenate([[0], trained, [0]])))
        offsets = own["offset_mapping"][0]
        spans = [(offsets[a][0], offsets[b - 1][1]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        if len(spans) != len(_answers(example)):
            raise _Uncertain
        turns = [example.messages[index] for index in _answers(example)]
        if any(_visible(turn["content"]) not in text[a:b] for turn, (a, b) in zip(turns, spans, strict=True)):
            raise _Uncertain  # templates that want content in parts drop a string and mark what is left
        return [
            Found(start, end, self._is_closed(text[start:end], turn))
            for (start, end), turn in zip(spans, turns, strict=True)
        ]

    def _is_closed(self, said: str, message: Message) -> bool:
        """Whether marked text goes on after the answer: some templates leave the end of the turn outside."""
        if message.get("tool_calls"):
            return any(said.rstrip().endswith(token) for token in self._tokenizer.added_tokens_encoder if token.strip())
        return not said.rstrip().endswith(message["content"].rstrip())

    def _by_prefix(self, example: Example, text: str) -> list[Found]:
        spans: list[Found] = []
        for index in _answers(example):
            start_text = self._chat(example, example.messages[:index], add_generation_prompt=True)
            start = len(start_text)
            if not text.startswith(start_text) or (spans and start < spans[-1].end):
                raise _Uncertain
            message = example.messages[index]
            if message.get("tool_calls") or message.get("reasoning_content"):
                # The template writes more than the content: only the conversation cut after it shows where it ends.
                whole = self._chat(example, example.messages[: index + 1])
                if not text.startswith(whole):
                    raise _Uncertain
                spans.append(Found(start, len(whole.rstrip()), closed=True))
                continue
            end = _answer_end(text, start, message["content"].strip())
            if end is None:
                end = self._end_from_behind(example, text, start, index)
            spans.append(Found(start, end, closed=False))
        return spans

    def _end_from_behind(self, example: Example, text: str, start: int, index: int) -> int:
        # The template writes something of its own first. From the turn's end backwards, for gpt-oss names a channel
        # "final", and an answer may be just that word.
        content = example.messages[index]["content"].strip()
        whole = self._chat(example, example.messages[: index + 1])
        pairs = enumerate(zip(text, whole, strict=False))
        common = next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(text), len(whole)))
        found = text.rfind(content, start, common)
        if found < 0:
            raise _Uncertain  # the template rewrote the answer
        return found + len(content)

    def _by_sentinel(self, example: Example, text: str) -> list[Found]:
        turns = [dict(message) for message in example.messages]
        words = [f"finefitAnswer{number}x" for number in range(len(_answers(example)))]
        for word, index in zip(words, _answers(example), strict=True):
            if turns[index].get("tool_calls"):
                raise _Uncertain
            turns[index]["content"] = word
            turns[index].pop("reasoning_content", None)
        # Some templates put an empty thought before an answer that has none: it stands where a real one would.
        pieces = re.split("|".join(words), self._chat(example, turns))
        around = [*(_EMPTY_THOUGHT.sub("", piece) for piece in pieces[:-1]), pieces[-1]]
        if len(around) != len(words) + 1 or not text.startswith(around[0]) or not text.endswith(around[-1]):
            raise _Uncertain
        spans: list[Found] = []
        start = len(around[0])
        for number, index in enumerate(_answers(example)):
            last = number == len(words) - 1
            end = len(text) - len(around[-1]) if last else text.find(around[number + 1], start)
            answer, content = text[start : max(end, 0)].rstrip(), example.messages[index]["content"].strip()
            if not answer or not (content.endswith(answer.strip()) or answer.endswith(_visible(content))):
                raise _Uncertain
            spans.append(Found(start, start + len(answer), closed=False))
            start = end + len(around[number + 1])
        return spans

    def _ended(self, example: Example, text: str, spans: list[Found]) -> tuple[str, tuple[Span, ...]]:
        """The spans with their end-of-turn tokens, less the answers of weight 0; perhaps with an end to the text."""
        plain = text[spans[-1].end :].strip()  # how this template ends an answer, if not by one special token
        ended: list[Span] = []
        for index, (start, end, closed) in zip(_answers(example), spans, strict=True):
            found = self._turn_end.match(text, end)
            if closed:
                end = start + len(text[start:end].rstrip())
            elif found:
                end = found.end()
            elif plain and text[end:].lstrip().startswith(plain):
                end = text.index(plain, end) + len(plain)
            elif index == len(example.messages) - 1:
                text = text[:end] + self._own_end(example)
                end = len(text)
            if example.messages[index].get("weight", 1):
                ended.append((start, end))
        return text, tuple(ended)

    def _own_end(self, example: Example) -> str:
        # Some templates end an answer only by beginning the next turn; a model that saw no end would never stop.
        if self._tokenizer.eos_token:
            return self._tokenizer.eos_token
        raise DataError(
            "neither the chat template nor the tokenizer has a token that ends an answer",
            where=example.where,
            hint="set eos_token in the model's tokenizer_config.json",
        )


def _answers(example: Example) -> list[int]:
    return [index for index, message in enumerate(example.messages) if message["role"] == "assistant"]


def _visible(content: str) -> str:
    """The answer without its thoughts, which many templates strip from earlier turns."""
    return content.rpartition("</think>")[2].strip()


def _answer_end(text: str, start: int, content: str) -> int | None:
    """Where ``content`` ends, if it begins at ``start``: as it is, or with its thought laid out differently or gone."""
    while text[start : start + 1].isspace():
        start += 1
    if text.startswith(content, start):
        return start + len(content)
    thought = re.escape(content.rpartition("</think>")[0].replace("<think>", "").strip())
    layout = rf"(?:(?:<think>)?\s*(?:{thought}\s*)?</think>\s*)?{re.escape(_visible(content))}"
    match = re.compile(layout).match(text, start)
    return match.end() if match else None


def _encoded(ids: Sequence[int], offsets: Sequence[Span], rendered: Rendered) -> Encoded:
    starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(ids), dtype=np.uint8)
    for start, end in rendered.spans:
        # A token with an empty span is a run of blanks that the byte-level trimmer shortened from its left.
        mask |= ((starts < end) & (ends > start)) | ((starts == ends) & (start < ends) & (ends <= end))
    mask[:1] = 0
    return Encoded(np.asarray(ids, dtype=np.int32), mask)


def segments(tokenizer: Tokenizer, encoded: Encoded) -> list[tuple[str, bool]]:
    """The example as text, cut where training begins or ends: ``(text, trained)``, for people to look at."""
    cuts = [0, *(np.flatnonzero(np.diff(encoded.mask)) + 1).tolist(), len(encoded.ids)]
    return [
        (str(tokenizer.decode(encoded.ids[a:b].tolist(), skip_special_tokens=False)), bool(encoded.mask[a]))
        for a, b in itertools.pairwise(cuts)
        if a < b
    ]
