"""Tokenizers of other packages: what they are, the ids of texts, and of chats with their loss masks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from nostall.errors import UsageError

Chat = Callable[[Any], tuple[Sequence[int], Sequence[int]]]


def _digest(*parts: object) -> str:
    hash = hashlib.sha256()
    for part in parts:
        hash.update(json.dumps(part, sort_keys=True, default=str).encode())
    return hash.hexdigest()[:32]


def _whole(tokenizer: Any) -> Any:
    """A copy that neither cuts nor fills: what a model takes at a time is no length of a document."""
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


class Ids:
    """Values that are ids already."""

    vocabulary: int | None = None
    identity = ("none", "", "")
    unknown = ""  # what `identity` does not tell apart, of which only the caller knows versions

    def encode(self, values: Sequence[Any]) -> Sequence[Sequence[int]]:
        return values

    def id_of(self, text: str) -> int | None:
        raise UsageError(f"end={text!r} is a text, and there is no tokenizer: pass the id")

    def chat(self, messages: Any) -> tuple[Sequence[int], Sequence[int]]:
        raise UsageError(
            "this tokenizer has no chat template: pass chat= a function that takes the messages and "
            "returns ids and mask"
        )


class Called(Ids):
    """A function from a text to its ids."""

    unknown = "a function"

    def __init__(self, function: Callable[[str], Sequence[int]]) -> None:
        self._function = function
        found = getattr(function, "vocabulary", None)
        self.vocabulary = None if found is None else int(found)
        name, size = getattr(function, "__qualname__", "function"), "" if found is None else found
        self.identity = ("function", name, str(size))

    def encode(self, values: Sequence[Any]) -> Sequence[Sequence[int]]:
        return [self._function(value) for value in values]


class HuggingFace(Ids):
    """A tokenizer of the package `tokenizers`."""

    def __init__(self, tokenizer: Any) -> None:
        import tokenizers

        self._tokenizer = _whole(tokenizer)
        # Neither the text of a tokenizer nor its pickle has it.
        self._splits = bool(tokenizer.encode_special_tokens)
        content = _digest(self._tokenizer.to_str(), *["splits special tokens"] * self._splits)
        self.identity = ("tokenizers", tokenizers.__version__, content)
        self.vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, values: Sequence[Any]) -> Sequence[Sequence[int]]:
        self._tokenizer.encode_special_tokens = self._splits
        found = self._tokenizer.encode_batch(list(values), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def id_of(self, text: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(text)
        return found


class Transformers(Ids):
    """A tokenizer of the package `transformers`."""

    def __init__(self, tokenizer: Any) -> None:
        import transformers

        self._tokenizer = tokenizer
        words = tokenizer.get_vocab()
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if hasattr(backend, "to_str"):
            content = _whole(backend).to_str()
        else:  # what it does with its words is in its code and its options
            content = [type(tokenizer).__name__, words]
            self.unknown = f"{type(tokenizer).__name__}, which is written in Python,"
        template = getattr(tokenizer, "chat_template", None)
        special = tokenizer.special_tokens_map
        splits = bool(getattr(tokenizer, "split_special_tokens", False))
        self.identity = (
            "transformers",
            transformers.__version__,
            _digest(content, special, template, *["splits special tokens"] * splits),
        )
        self.vocabulary = max(words.values()) + 1
        self._marks = isinstance(template, str) and "generation %}" in template.replace("-", "")

    def encode(self, values: Sequence[Any]) -> Sequence[Sequence[int]]:
        found = self._tokenizer(
            list(values), add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        ids: Sequence[Sequence[int]] = found["input_ids"]
        return ids

    def id_of(self, text: str) -> int | None:
        found: int | None = self._tokenizer.get_vocab().get(text)
        return found

    def _rendered(self, messages: Any, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, **options
        )

    def chat(self, messages: Any) -> tuple[Sequence[int], Sequence[int]]:
        """The ids of a chat, and which of them its assistant wrote: what the template marks as
        generated, or else what each of its messages adds to the prompt before it."""
        if not self._tokenizer.chat_template:
            return super().chat(messages)
        if self._marks:
            found = self._rendered(messages, return_assistant_tokens_mask=True)
            return found["input_ids"], found["assistant_masks"]
        ids = list(self._rendered(messages)["input_ids"])
        mask = [0] * len(ids)
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = list(
                self._rendered(messages[:number], add_generation_prompt=True)["input_ids"]
            )
            behind = list(self._rendered(messages[: number + 1])["input_ids"])
            if ids[: len(behind)] != behind or behind[: len(before)] != before:
                raise UsageError(
                    "the chat template does not add each message to the text before it, so that it "
                    "does not tell which tokens are learned: mark them by {% generation %} in the "
                    "template, or pass chat= a function"
                )
            mask[len(before) : len(behind)] = [1] * (len(behind) - len(before))
        return ids, mask


class Tiktoken(Ids):
    """An encoding of the package `tiktoken`."""

    def __init__(self, encoding: Any) -> None:
        import tiktoken

        self._encoding = encoding
        ranks = sorted((list(token), rank) for token, rank in encoding._mergeable_ranks.items())
        content = _digest(encoding._pat_str, ranks, encoding._special_tokens)
        self.identity = ("tiktoken", tiktoken.__version__, content)
        self.vocabulary = int(encoding.n_vocab)

    def encode(self, values: Sequence[Any]) -> Sequence[Sequence[int]]:
        return [self._encoding.encode_ordinary(value) for value in values]

    def id_of(self, text: str) -> int | None:
        try:
            return int(self._encoding.encode_single_token(text))
        except KeyError:
            return None


def tokenizer_of(given: Any) -> Ids:
    """A tokenizer by its package.

    Raises:
        UsageError: it is none.
    """
    if given is None:
        return Ids()
    if isinstance(given, str | os.PathLike):
        try:
            import tokenizers
        except ImportError:
            raise UsageError(
                f"{given} needs the package tokenizers: pip install 'nostall[text]'"
            ) from None
        try:
            return HuggingFace(tokenizers.Tokenizer.from_file(os.fspath(given)))
        except Exception as error:  # the package has no kind of its own
            raise UsageError(f"{given} cannot be opened as a tokenizer.json: {error}") from None
    bases = {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(given).__mro__}
    for name, adapter in (
        ("tokenizers.Tokenizer", HuggingFace),
        ("transformers.PreTrainedTokenizerBase", Transformers),
        ("tiktoken.Encoding", Tiktoken),
    ):
        if name in bases:
            return adapter(given)
    if callable(given):
        return Called(given)
    raise UsageError(
        f"tokenizer= is {type(given).__name__}: it must be one of tokenizers, transformers or "
        "tiktoken, the path of a tokenizer.json, a function from a text to its ids, or None"
    )
