"""Incremental text: whole characters, bounded work, stop strings over token borders."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from jaxserve.models.detokenizer import Detokenizer, StopChecker, StopMatch

SMILE = "\U0001f642".encode()  # F0 9F 99 82
BAD = "\ufffd"


class ByteTokens:
    """Token i is the i-th piece of bytes, as in byte-level BPE; counts its work."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces, self.decoded = pieces, 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


class SentencePieces(ByteTokens):
    """Pieces with U+2581 for a space, "<0x0A>" for a byte, "<s>" skipped as special."""

    DECODER = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        pieces = [str(self.pieces[i]) for i in ids if self.pieces[i] != "<s>"]
        return self.DECODER.decode(pieces)


def text_pieces(*pieces: str) -> ByteTokens:
    return ByteTokens([piece.encode() for piece in pieces])


def stream(tokens: ByteTokens, stop: Sequence[str] = ()) -> tuple[list[str], str]:
    """(deltas, rest) of all pieces, one at a time, within the bound on decoding."""
    detokenizer = Detokenizer(tokens, stop)
    deltas = []
    for token in range(len(tokens.pieces)):
        tokens.decoded = 0
        deltas.append(detokenizer.push([token])[0])
        assert tokens.decoded <= 8
    return deltas, detokenizer.finish()


def whole(tokens: ByteTokens) -> str:
    return tokens.decode(range(len(tokens.pieces)))


# --- stop strings ---------------------------------------------------------------------


def test_a_stop_string_over_two_tokens_is_cut_off():
    tokens = text_pieces("The quick", " br", "own", " fox", " jumps")
    detokenizer = Detokenizer(tokens, ["own fox"])
    assert detokenizer.push([0]) == ("The quick", None)
    assert detokenizer.push([1]) == (" br", None)
    assert detokenizer.push([2]) == ("", None)
    assert detokenizer.push([3, 4]) == ("", StopMatch("own fox", 4))


def test_held_text_is_released_when_it_is_no_stop_string():
    deltas, rest = stream(text_pieces("The quick", " br", "own", " cat"), ["own fox"])
    assert deltas == ["The quick", " br", "", "own cat"]
    assert rest == ""


def test_held_text_is_released_at_the_end():
    deltas, rest = stream(text_pieces("The quick", " br", "own"), ["own fox"])
    assert (deltas, rest) == (["The quick", " br", ""], "own")


def test_a_match_inside_a_piece():
    detokenizer = Detokenizer(text_pieces("The quick"), ["ick"])
    assert detokenizer.push([0]) == ("The qu", StopMatch("ick", 1))


def test_tokens_after_the_match_are_not_counted():
    detokenizer = Detokenizer(text_pieces("a", "b", "c", "d"), ["bc"])
    assert detokenizer.push([0, 1, 2, 3]) == ("a", StopMatch("bc", 3))


def test_before_min_tokens_a_completed_stop_string_is_let_through():
    tokens = text_pieces("a stop", " b st", "op", " c")
    detokenizer = Detokenizer(tokens, ["stop", "stopped"])
    assert detokenizer.push([0], may_stop=False) == ("a ", None)  # may be "stopped"
    # Begun before, completed after: it counts.
    assert detokenizer.push([1], may_stop=False) == ("stop b ", None)
    assert detokenizer.push([2]) == ("", StopMatch("stop", 3))


def test_text_let_through_does_not_match_later():
    detokenizer = Detokenizer(text_pieces("stop", "x"), ["stop", "stopped"])
    assert detokenizer.push([0], may_stop=False) == ("", None)
    assert detokenizer.push([1]) == ("stopx", None)


def test_the_match_that_is_complete_first_wins():
    # At "d" the text is "abcd": "bcd" and "d" end there, and "bcd" is the longer.
    detokenizer = Detokenizer(text_pieces("abcdef"), ["cdef", "d", "bcd"])
    assert detokenizer.push([0]) == ("a", StopMatch("bcd", 1))


def test_a_stop_string_of_split_characters():
    tokens = ByteTokens([b"x", SMILE[:2], SMILE[2:], b"y"])
    detokenizer = Detokenizer(tokens, ["\U0001f642y"])
    assert detokenizer.push([0, 1, 2, 3]) == ("x", StopMatch("\U0001f642y", 4))


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_stops_do_not_depend_on_the_cuts(text, stops, sizes):
    """One character at a time is the definition; any other cutting agrees."""
    shown, match = "", None
    for end in range(1, len(text) + 1):
        at = [s for s in stops if text[:end].endswith(s)]
        if at:
            match = max(at, key=len)
            shown = text[: end - len(match)]
            break
    checker, released, found, start = StopChecker(stops), "", None, 0
    for size in sizes:
        out, found = checker.feed(text[start : start + size])
        released += out
        assert text.startswith(released)
        if found is not None:
            break
        start += size
    assert found == match
    assert released + checker.held == (text if match is None else shown)


@pytest.mark.parametrize("stop", ["text", ["a", ""]])
def test_stop_strings_are_several_and_not_empty(stop):
    with pytest.raises(ValueError, match="must be several non-empty strings"):
        StopChecker(stop)


# --- characters -----------------------------------------------------------------------


def test_a_character_over_two_tokens_comes_whole():
    assert stream(ByteTokens([SMILE[:2], SMILE[2:]])) == (["", "\U0001f642"], "")


def test_a_byte_token_of_a_newline_is_a_newline():
    tokens = SentencePieces(["\u2581a", "<0x0A>", "<0x0A>", "\u2581b"])  # type: ignore[list-item]
    assert stream(tokens) == (["a", "\n", "\n", " b"], "")


def random_text(rng: random.Random) -> bytes:
    kinds = [
        (0x20, 0x7E),
        (0xA0, 0x7FF),
        (0x800, 0xD7FF),
        (0xE000, 0xFFFC),
        (0x10000, 0x10FFFF),
    ]
    size = rng.randint(1, 40)
    return "".join(chr(rng.randint(*rng.choice(kinds))) for _ in range(size)).encode()


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    places = rng.sample(range(1, len(data)), rng.randint(0, len(data) - 1))
    ends = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def test_a_thousand_strings_cut_at_random_bytes():
    rng = random.Random(0)
    for _ in range(1000):
        data = random_text(rng)
        tokens = ByteTokens(cut(rng, data))
        deltas, rest = stream(tokens)
        assert "".join(deltas) == data.decode()  # never half a character
        assert rest == ""


def test_random_bytes_join_to_the_whole_decoding():
    rng = random.Random(1)
    alphabet = [0xFF, 0xF0, 0x9F, 0x99, 0x82, 0x41, 0xE4, 0xB8, 0xAD, 0xC3]
    for _ in range(1000):
        data = bytes(rng.choices(alphabet, k=rng.randint(1, 20)))
        tokens = ByteTokens(cut(rng, data))
        deltas, rest = stream(tokens)
        text = whole(tokens)
        assert ("".join(deltas) + rest).rstrip(BAD) == text.rstrip(BAD)
        assert text.startswith("".join(deltas))
        # Text is at most three tokens late.
        for late in range(3, len(deltas)):
            seen = tokens.decode(range(late - 2))
            assert len("".join(deltas[: late + 1])) >= len(seen)


def test_random_sentence_pieces_join_to_the_whole_decoding():
    rng = random.Random(2)
    words = ["\u2581", "\u2581Hello", "lo", "\u2581a", ".", "c"]
    for _ in range(1000):
        pieces: list[str] = []
        for _ in range(rng.randint(1, 12)):
            if rng.random() < 0.4:
                character = rng.choice("\U0001f642\u4e2d\u00e9\nA").encode()
                pieces += [f"<0x{byte:02X}>" for byte in character]
            else:
                pieces.append(rng.choice(words))
            pieces += ["<s>"] * (rng.random() < 0.1)
        tokens = SentencePieces(pieces)  # type: ignore[arg-type]
        deltas, rest = stream(tokens)
        assert "".join(deltas) + rest == whole(tokens), pieces


def test_fifty_invalid_bytes_flow():
    tokens = ByteTokens([b"\xff"] * 50 + [b"ok"])
    deltas, rest = stream(tokens)
    for token in range(50):  # at most three tokens late
        assert "".join(deltas[: token + 4]).count(BAD) >= token + 1
    assert "".join(deltas) + rest == BAD * 50 + "ok"


@pytest.mark.parametrize(
    "tokens",
    [
        ByteTokens([b"a", SMILE[:1], SMILE[1:2], SMILE[2:3]]),
        ByteTokens([b"a" + SMILE[:3]]),
        SentencePieces(["\u2581a", "<0xF0>", "<0x9F>", "<0x99>"]),  # type: ignore[list-item]
    ],
)
def test_half_a_character_at_the_end_is_one_replacement(tokens):
    deltas, rest = stream(tokens)
    assert "".join(deltas) == "a"
    assert rest == BAD


def test_one_push_of_many_tokens_is_many_pushes_of_one():
    rng = random.Random(3)
    tokens = ByteTokens(cut(rng, random_text(rng)))
    deltas, rest = stream(tokens)
    at_once = Detokenizer(tokens)
    text, match = at_once.push(range(len(tokens.pieces)))
    assert (text + at_once.finish(), match) == ("".join(deltas) + rest, None)


def test_a_copy_is_a_fork():
    tokens = ByteTokens([SMILE[:2], SMILE[2:], b"!", b"?"])
    one = Detokenizer(tokens, ["?"])
    one.push([0])
    other = copy.copy(one)
    assert one.push([1, 2]) == ("\U0001f642!", None)
    assert other.push([1, 3]) == ("\U0001f642", StopMatch("?", 3))
