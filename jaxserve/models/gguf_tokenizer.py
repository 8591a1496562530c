"""The tokenizer that a GGUF file carries as metadata, built as a `tokenizers` pipeline.

Owns GGUF's vocabulary conventions: token types, the named pre-tokenizers of byte-level
BPE, and SentencePiece vocabularies with scores in place of merges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxserve.models.tokenizer import SPECIAL_TOKENS, Tokenizer, add_special_tokens

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False)]


def _smollm() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _llama3() -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_PRE_TOKENIZERS: dict[str, Callable[[], list[pre_tokenizers.PreTokenizer]]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
}


class Metadata(Protocol):
    """Metadata of a file, by key."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default."""
        ...


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The file's tokenizer.

    Raises ValueError naming the kind of vocabulary or pre-tokenizer that is unknown.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if kind == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
        backend = _byte_level(tokens, metadata.get("tokenizer.ggml.merges", []), pre)
        adds_bos = pre == "llama-bpe"
    elif kind == "llama":
        scores = metadata.get("tokenizer.ggml.scores", [])
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        backend = _sentencepiece(tokens, scores, prefix)
        adds_bos = True
    else:
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} is not supported; known: 'gpt2' "
            "(byte-level BPE) and 'llama' (SentencePiece); or give a directory with "
            "tokenizer.json"
        )
    types = metadata.get("tokenizer.ggml.token_type", [])
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=special)
                for token, found in zip(tokens, types, strict=False)
                if found == wanted
            ]
        )
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in zip(
            SPECIAL_TOKENS, ("bos", "eos", "unknown", "padding"), strict=True
        )
    }
    special_tokens = {name: tokens[i] for name, i in ids.items() if i is not None}
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    add_special_tokens(
        backend,
        bos=special_tokens.get("bos_token") if adds_bos else None,
        eos=special_tokens.get("eos_token") if adds_eos else None,
    )
    ends = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom"))
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_ids=[token for token in ends if token is not None],
        template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level(tokens: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre={pre!r} is not supported; known: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}; or give a directory with "
            "tokenizer.json"
        )
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in merges],
            # Llama 3 takes a whole word that is in the vocabulary without merging.
            ignore_merges=pre == "llama-bpe",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _sentencepiece(
    tokens: list[str], scores: list[float], prefix: bool
) -> tokenizers.Tokenizer:
    """BPE over pieces with U+2581 for a space, and bytes for what no piece covers.

    SentencePiece joins the neighbours whose union scores highest. As BPE merges that is
    every split of a piece into two pieces, in the order of the union's score.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        (-scores[index], vocab[left], vocab[right], left, right)
        for index, piece in enumerate(tokens)
        for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        if left in vocab and right in vocab
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in sorted(merges)],
            unk_token=tokens[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    start = [normalizers.Prepend("\u2581")] if prefix else []
    backend.normalizer = normalizers.Sequence(
        [*start, normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return backend
