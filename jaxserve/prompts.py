"""Prompts as users write them: a text, token ids, a mapping, or a conversation.

Owns the forms that are accepted. Never sees an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from jaxserve.models.tokenizer import Tokenizer

Message = Mapping[str, str]


class Chat(NamedTuple):
    """A conversation in its template: the text holds special tokens that `encode` would
    not read as such."""

    text: str
    token_ids: list[int]


Prompt = str | Sequence[int] | Mapping[str, Any] | Chat


class ReadPrompt(NamedTuple):
    """What a prompt says."""

    text: str | None  # None where it is token ids
    token_ids: Sequence[int]
    cache_salt: str | None = None


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer; ValueError if there is none."""
    if tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer.json, so prompts must be token ids; "
            "put the file beside its config.json to use text"
        )
    return tokenizer


def read(name: str, prompt: Prompt, tokenizer: Tokenizer | None) -> ReadPrompt:
    """The token ids of a prompt, and what else it says.

    Args:
      name: of the prompt, in errors.

    Raises:
      ValueError: it is none, or a text without a tokenizer. Token ids are not checked.
    """
    salt = None
    if isinstance(prompt, Chat):
        return ReadPrompt(prompt.text, prompt.token_ids)
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        given = {"prompt", "prompt_token_ids"} & set(prompt)
        if unknown or len(given) != 1:
            raise ValueError(
                f"{name} has the keys {list(prompt)}; it must have either prompt or "
                "prompt_token_ids, and may have cache_salt"
            )
        salt, kind = prompt.get("cache_salt"), given.pop()
        prompt = cast(str | Sequence[int], prompt[kind])
        if isinstance(prompt, str) != (kind == "prompt"):
            raise ValueError(
                f"{name} has {kind}={prompt!r}; prompt must be a text, and "
                "prompt_token_ids a list of token ids"
            )
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} must be valid Unicode, but {error}; replace the lone "
                "surrogates"
            ) from None
        return ReadPrompt(prompt, needed(tokenizer).encode(prompt), salt)
    return ReadPrompt(None, prompt, salt)


def render(messages: Sequence[Message], tokenizer: Tokenizer | None) -> Chat:
    """A conversation by the checkpoint's own chat template.

    Raises:
      ValueError: there is no template, or it refuses the messages.
    """
    rendered = needed(tokenizer)
    return Chat(
        rendered.apply_chat_template(messages, tokenize=False),
        rendered.apply_chat_template(messages),
    )
