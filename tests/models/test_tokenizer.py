"""Tokenizers: vocabularies of GGUF files, special tokens, chat prompts with one BOS."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxserve.models import chat_template
from jaxserve.models.gguf_tokenizer import build_tokenizer
from jaxserve.models.tokenizer import Tokenizer, add_special_tokens

HI = [{"role": "user", "content": "hi"}]


# --- GGUF vocabularies ----------------------------------------------------------------


def sentencepiece_file(**changes) -> dict:
    """Metadata of a small llama vocabulary: specials, bytes, pieces with scores."""
    pieces = {
        "\u2581": -20, "h": -21, "e": -22, "l": -23, "o": -24, "w": -25, "r": -26,
        "d": -27, "he": -1, "ll": -2, "llo": -3, "hello": -4, "\u2581hello": -5,
        "el": -0.5, "\u2581w": -6, "or": -7, "\u2581wor": -8, "ld": -9, "lo": -2.5,
    }  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(s) for s in pieces.values()],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def sentencepiece_ids(file: dict, text: str) -> list[int]:
    """SentencePiece's definition: join the best-scored neighbours, over and over."""
    tokens, scores = file["tokenizer.ggml.tokens"], file["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    symbols = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        joined = [
            (-scores[ids[a + b]], at)
            for at, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in ids
        ]
        if not joined:
            break
        at = min(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out = []
    for symbol in symbols:
        known = [ids[symbol]] if symbol in ids else [3 + b for b in symbol.encode()]
        out += known
    return out


def test_sentencepiece_joins_the_best_score_first():
    file = sentencepiece_file()
    tokenizer = build_tokenizer(file)
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("hello world\n\u00e9\u4e2d", k=rng.randint(1, 12)))
        ids = tokenizer.encode(text)
        assert ids == [1, *sentencepiece_ids(file, text)], text
        assert tokenizer.decode(ids) == text


def test_sentencepiece_facts():
    tokenizer = build_tokenizer(sentencepiece_file())
    assert tokenizer.encode("") == [1]  # BOS by default
    assert tokenizer.decode([3 + 0x0A]) == "\n"
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.encode("</s>")[-1] == 2
    plain = sentencepiece_file(**{"tokenizer.ggml.add_bos_token": False})
    assert build_tokenizer(plain).encode("") == []


def byte_level_file(**changes) -> dict:
    """Metadata of a byte-level vocabulary: the bytes, two merges, three specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "12", "\u0120\u0120", "<|bos|>", "<|eot|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": ["1 2", "\u0120 \u0120"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.eot_token_id": 259,
        **changes,
    }


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i], False) for i in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        # One run of digits; the last of the spaces before it goes with it.
        ("gpt-2", [" ", " ", "3", "3", "12"]),
        # Every digit stands alone, so both spaces stay together.
        ("smollm", ["  ", "3", "3", "1", "2"]),
        # Three digits, then one; the last space stands alone; and BOS.
        ("llama-bpe", ["<|bos|>", " ", " ", "3", "3", "1", "2"]),
    ],
)
def test_pre_tokenizers_split_digits_each_their_way(pre, wanted):
    tokenizer = build_tokenizer(byte_level_file(**{"tokenizer.ggml.pre": pre}))
    assert pieces(tokenizer, "  3312") == wanted


def test_token_types_say_what_is_special():
    tokenizer = build_tokenizer(byte_level_file())
    assert tokenizer.encode("<|eot|>") == [259]
    assert tokenizer.encode("<tool>") == [260]
    assert tokenizer.decode([259, 260]) == "<tool>"  # user-defined is no control token
    assert tokenizer.eos_ids == (258, 259)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "bert", "model='bert' is not supported; known: 'gpt2'"),
        ("pre", "viking", "pre='viking' is not supported; known: gpt-2, llama-bpe"),
    ],
)
def test_unknown_vocabularies_are_refused(key, value, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(byte_level_file(**{f"tokenizer.ggml.{key}": value}))


# --- directories ----------------------------------------------------------------------


def directory(path, *, template=None, adds_bos=True, **config):
    """tokenizer.json of single characters and two specials, and its config."""
    vocab = {"<s>": 0, "</s>": 1, **{chr(c): c - 30 for c in range(32, 127)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    if adds_bos:
        add_special_tokens(backend, bos="<s>", eos=None)
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_directory(path)


WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
)
WITHOUT_BOS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_li5_a_template_with_bos_gives_exactly_one(tmp_path):
    """LI5 (vllm#16976): the template held BOS, and the tokenizer added another."""
    tokenizer = directory(tmp_path, template=WITH_BOS)
    text = tokenizer.apply_chat_template(HI, tokenize=False)
    assert text == "<s>hi</s>"
    wanted = [0, ord("h") - 30, ord("i") - 30, 1]
    assert tokenizer.apply_chat_template(HI) == wanted
    assert tokenizer.encode(text) == wanted  # the rendered text as a prompt
    assert tokenizer.encode("hi") == [0, ord("h") - 30, ord("i") - 30]
    assert tokenizer.encode("") == [0]


def test_li5_a_template_without_bos_gets_none(tmp_path):
    tokenizer = directory(tmp_path, template=WITHOUT_BOS)
    assert 0 not in tokenizer.apply_chat_template(HI)
    assert tokenizer.apply_chat_template(HI, tokenize=False) == "[user]hi"


def test_bos_written_twice_stays_if_the_tokenizer_adds_none(tmp_path):
    tokenizer = directory(tmp_path, adds_bos=False)
    assert tokenizer.encode("<s><s>") == [0, 0]
    assert tokenizer.encode("") == []


@pytest.mark.parametrize(("flag", "wanted"), [(True, [0, 67, 1]), (False, [67])])
def test_the_config_says_which_tokens_are_added(tmp_path, flag, wanted):
    tokenizer = directory(tmp_path, add_bos_token=flag, add_eos_token=flag)
    assert tokenizer.encode("a") == wanted


def test_a_flag_that_is_absent_leaves_the_file_as_it_is(tmp_path):
    assert directory(tmp_path, add_eos_token=True).encode("a") == [0, 67, 1]
    assert directory(tmp_path, add_bos_token=None).encode("a") == [0, 67]


def test_truncation_and_padding_of_the_file_are_not_ours(tmp_path):
    directory(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_directory(tmp_path).encode("abcd")) == 5


def test_special_tokens_are_skipped_unless_asked_for(tmp_path):
    tokenizer = directory(tmp_path)
    assert tokenizer.decode([0, 67, 1]) == "a"
    assert tokenizer.decode([0, 67, 1], skip_special_tokens=False) == "<s>a</s>"
    assert tokenizer.vocab_size == 97
    assert tokenizer.eos_ids == (1,)


def test_the_template_file_wins_and_named_ones_have_a_default(tmp_path):
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    tokenizer = directory(tmp_path, template=named)
    assert tokenizer.apply_chat_template(HI, tokenize=False) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.apply_chat_template(HI, tokenize=False) == "F"


def test_no_template_and_no_tokenizer_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="no chat template; write the prompt as text"):
        directory(tmp_path).apply_chat_template(HI)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        Tokenizer.from_directory(tmp_path)


# --- chat templates -------------------------------------------------------------------


def test_blocks_take_their_lines_with_them():
    # trim_blocks and lstrip_blocks: what the checkpoints' templates are written for.
    template = (
        "{% for m in messages %}\n"
        "  {% if m.role == 'user' %}\nU\n  {% endif %}\n"
        "{% endfor %}"
    )
    assert chat_template.render(template, HI) == "U\n"


def test_json_is_not_escaped_for_html():
    template = "{{ messages[0] | tojson }}{{ messages[0].content | tojson(indent=2) }}"
    messages = [{"role": "user", "content": "<\u00e9>"}]
    wanted = '{"role": "user", "content": "<\u00e9>"}"<\u00e9>"'
    assert chat_template.render(template, messages) == wanted


def test_loop_controls_and_dates():
    template = "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"
    assert chat_template.render(template, [*HI, *HI]) == "hi"
    year = chat_template.render("{{ strftime_now('%Y') }}", HI)
    assert len(year) == 4 and year.isdigit()


def test_marks_for_training_are_left_out():
    # As in templates that serve for fine-tuning too.
    template = (
        "{% for m in messages %}A:{% generation %}{% set said = m.content %}"
        "{{ said }}!{% endgeneration %}{{ said }}{% endfor %}"
    )
    assert chat_template.render(template, HI) == "A:hi!"


def test_tools_that_nobody_gave_are_none():
    # As some of Mistral's templates ask, without asking whether they are defined.
    template = "{% if tools is not none %}TOOLS {% endif %}{{ messages[0].content }}"
    assert chat_template.render(template, HI) == "hi"
    assert chat_template.render(template, HI, tools=[]) == "TOOLS hi"


def test_variables_and_other_fields_reach_the_template():
    template = "{{ messages[0].name }} {{ thinking }} {{ add_generation_prompt }}"
    messages = [{**HI[0], "name": "Ada"}]
    rendered = chat_template.render(
        template, messages, thinking="on", add_generation_prompt=True
    )
    assert rendered == "Ada on True"


def test_a_refusal_of_the_template_is_told():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="refuses the messages: roles must alternate"):
        chat_template.render(template, HI)
    with pytest.raises(ValueError, match="not valid Jinja"):
        chat_template.render("{% for %}", HI)


def test_templates_run_in_a_sandbox():
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(ValueError, match="refuses the messages"):
            chat_template.render(template, HI)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hi", "messages must be a list of messages, not str"),
        (HI[0], "messages must be a list of messages, not dict"),
        ([*HI, "hi"], r"messages\[1\]='hi' must be a mapping"),
        ([{"content": "hi"}], r"messages\[0\] lacks 'role'; it has \['content'\]"),
        ([{"role": "user"}], r"messages\[0\] lacks 'content'"),
        ([{"role": "user", "content": None}], r"\['content'\]=None must be a string"),
        ([{"role": 3, "content": "hi"}], r"messages\[0\]\['role'\]=3 must be a string"),
        ([{"role": "", "content": "hi"}], r"messages\[0\]\['role'\] is empty"),
    ],
)
def test_wrong_messages_are_named(messages, message):
    with pytest.raises(ValueError, match=message):
        chat_template.render("x", messages)
