"""Strings that are hard on tokenizers, and byte-level BPE as published to encode them.

Owns the reference for tests of the GGUF tokenizer; make_fixtures.py writes it out.
"""

from __future__ import annotations

import math
import random

import regex

# SmolLM2 splits every digit off first, then as GPT-2 does (llama.cpp: "smollm").
DIGIT = regex.compile(r"\p{N}|\P{N}+")
WORD = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)

STRINGS = [
    "", " ", "  ", "\n", "\t", "\r\n", "a", " a", "a ", "Hello, world!",
    "Hello world! 123", "  multiple   spaces", "Café déjà vu.", "naïve façade",
    "Ünïcödé", "e\u0301a\u0301", "北京是中国的首都。", "你好，世界！",
    "日本語のテキスト", "한국어 문장입니다", "Привет, мир", "שלום עולם",
    "مرحبا بالعالم", "สวัสดีชาวโลก", "हिन्दी में लिखा", "🙂", "🙂🙃 ok",
    "👨‍👩‍👧‍👦 family", "🇫🇷🇩🇪", "a🙂b", "☀️ 31 °C", "1", "12", "123456789",
    "3.14159", "1,000,000", "x = 100", "  5", "a  5", "a\n\n7", "２０２４年", "½ cup",
    "①②③", "v1.2.3-rc4", "0x1F", "1e-5", "#1", "it's we'll I'd you've they're",
    "IT'S", "don't", "''s", "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}", "<html>\n  <body>\n</html>",
    "SELECT * FROM t WHERE a >= 10;", "https://example.org/a?b=c&d=%20#e", "a@b.co",
    "C:\\Users\\x", "$x^2 + y^2 = z^2$", "\\frac{1}{2}", "...", "!!!???", "----",
    "====", "\u00a0nbsp", "zero\u200bwidth", "\u3000全角", "tab\tseparated\tvalues",
    "trailing   ", "line\nline\n\nline\n\n\n", "\n\n  indented",
    "mixed \t\n whitespace", "\ufffd", "\u0000", "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|>", "<|endoftext|>", "a<|im_end|>b", " <|im_end|> ",
    "<|im_start|><|im_start|>", "<|im_sta", "<repo_name>x<file_sep>",
    "<|im_end|>1<|im_end|>", "The quick brown fox jumps over the lazy dog.",
    "Supercalifragilisticexpialidocious", "aaaaaaaaaaaaaaaaaaaaaaaa", "ABCdefGHI",
    "snake_case", "camelCaseName", "kebab-case-name", "SCREAMING_CASE",
    "“quoted” ‘text’ — dash…", "§ 12 (3)",
]  # fmt: skip
PIECES = [
    *" \n\t.,:;!?'\"()[]{}<>=+-*/_\\|&%$#@~^`", "  ", "   ", "\n\n", "0", "7", "42",
    "2024", "the", " and", "Hello", "x", "Z", "'s", "'ll", "é", "ß", "Ж", "中",
    "日本", "🙂", "👍🏽", "½", "\u00a0", "<|im_start|>", "<|im_end|>", "ing", " un",
    "def ", "return", "\r\n",
]  # fmt: skip


def strings(count: int = 200) -> list[str]:
    rng = random.Random(0)
    mixed = ("".join(rng.choices(PIECES, k=rng.randint(1, 14))) for _ in range(count))
    return [*STRINGS, *mixed]


class PlainBPE:
    """Byte-level BPE as published, for comparison: lowest merge rank first."""

    def __init__(self, tokens: list[str], types: list[int], merges: list[str]) -> None:
        # GPT-2's spelling: printable bytes stand for themselves, others follow at 256.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.spelling = {byte: chr(byte) for byte in printable}
        self.spelling |= {byte: chr(256 + n) for n, byte in enumerate(others)}
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(m.split(" ")): rank for rank, m in enumerate(merges)}
        control = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
        control.sort(key=len, reverse=True)
        self.control = regex.compile("(" + "|".join(map(regex.escape, control)) + ")")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(self.control.split(text)):
            if place % 2:
                ids.append(self.ids[part])
                continue
            for run in DIGIT.findall(part):
                for word in WORD.findall(run):
                    ids += self._merge([self.spelling[b] for b in word.encode()])
        return ids

    def _merge(self, symbols: list[str]) -> list[int]:
        while len(symbols) > 1:
            pairs = zip(symbols, symbols[1:], strict=False)
            rank, at = min(
                (self.ranks.get(pair, math.inf), at) for at, pair in enumerate(pairs)
            )
            if rank == math.inf:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[symbol] for symbol in symbols]
