"""Text to token ids and back, and conversations to prompts.

Owns the special tokens and the chat template of one checkpoint; the work is done by the
`tokenizers` library. Never sees a request or a device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers
from tokenizers.processors import TemplateProcessing

from jaxserve.models import chat_template

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """One checkpoint's tokenizer; stateless once built."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        template: str | None = None,
    ) -> None:
        """Wrap a `tokenizers` pipeline.

        Args:
          backend: the pipeline; its post-processor adds BOS if the checkpoint wants it.
          special_tokens: texts under names of SPECIAL_TOKENS, for the chat template.
          eos_ids: token ids that end a text, beside `special_tokens["eos_token"]`.
          template: Jinja source of the chat template, if there is one.
        """
        self._backend = backend
        self._special = dict(special_tokens or {})
        self._template = template
        eos = self._id(self._special.get("eos_token"))
        ids = {*eos_ids} if eos is None else {*eos_ids, eos}
        self.eos_ids: tuple[int, ...] = tuple(sorted(ids))
        self.bos_id = self._id(self._special.get("bos_token"))
        self._adds_bos = backend.encode("").ids[:1] == [self.bos_id]

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja.

        Raises FileNotFoundError if there is no tokenizer.json.
        """
        path = directory / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing; write it with transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_truncation()  # files of training runs may ask for it, silently
        backend.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        named = {**_read_json(directory / "special_tokens_map.json"), **config}
        special = {
            name: text
            for name in SPECIAL_TOKENS
            if (text := _token_text(named.get(name))) is not None
        }
        flags = {n: config.get(f"add_{n}") for n in ("bos_token", "eos_token")}
        if any(flag is not None for flag in flags.values()):
            added = backend.encode("").tokens  # what a flag that is absent leaves alone
            wanted = {
                name: special.get(name)
                for name, flag in flags.items()
                if (special.get(name) in added if flag is None else flag)
            }
            add_special_tokens(
                backend, bos=wanted.get("bos_token"), eos=wanted.get("eos_token")
            )
        return cls(
            backend,
            special_tokens=special,
            template=_read_template(directory, config.get("chat_template")),
        )

    @property
    def vocab_size(self) -> int:
        """Ids known here, added tokens included; a model may pad its V beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, if there is one."""
        return self._template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens in it are recognised.

        BOS is put in front if the checkpoint wants one and the text does not begin with
        it already, as a rendered conversation may: never two.

        Args:
          add_special_tokens: False adds none, as for a part of a text.
        """
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if not add_special_tokens:
            return ids
        return ids[1:] if self._adds_bos and ids[1:2] == [self.bos_id] else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[False],
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """A conversation as the checkpoint was trained to read it.

        Args:
          messages: mappings with "role" and "content"; at least one.
          add_generation_prompt: end where the assistant's answer begins.
          tokenize: return ids; the special tokens are those the template writes, and
            no BOS is added to them.
          **variables: handed to the template.

        Raises ValueError if there is no template or the messages are wrong.
        """
        if self._template is None:
            raise ValueError(
                "this checkpoint has no chat template; write the prompt as text"
            )
        given = {"add_generation_prompt": add_generation_prompt, **variables}
        text = chat_template.render(
            self._template, messages, **{**self._special, **given}
        )
        if not tokenize:
            return text
        return self._backend.encode(text, add_special_tokens=False).ids


def add_special_tokens(
    backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None
) -> None:
    """Make `backend` put these around every text, and nothing else."""
    parts = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    backend.post_processor = TemplateProcessing(
        single=parts,
        pair=[*parts, "$B:1"],
        special_tokens=[(t, backend.token_to_id(t)) for t in {bos, eos} if t],
    )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _token_text(value: str | Mapping[str, Any] | None) -> str | None:
    return value["content"] if isinstance(value, Mapping) else value


def _read_template(directory: Path, inline: Any) -> str | None:
    """The file wins over the config; of several named ones, "default"."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    if isinstance(inline, list):
        return {entry["name"]: entry["template"] for entry in inline}.get("default")
    return inline
