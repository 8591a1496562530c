"""lm-eval's model against the real package, on tasks of a few lines.

Runs where lm-eval is installed: docs/rl.md says how.
"""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from jaxserve import LLM
from jaxserve.adapters.lm_eval import JaxserveLM
from jaxserve.models import smollm2_path

QUESTION = "The capital of France is"
CITIES = [" Paris", " Berlin", " Madrid"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        smollm2_path(),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_logprobs=0,
    )


@pytest.fixture(scope="module")
def lm(llm: LLM) -> JaxserveLM:
    return JaxserveLM(llm=llm, max_gen_toks=8)


def requests(kind: str, *arguments) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)
        for i, each in enumerate(arguments)
    ]


def logprobs(llm: LLM, tokens: list[int]) -> np.ndarray:
    """f32[T - 1, V] of what follows each token but the last, without a cache."""
    positions = jnp.arange(len(tokens) - 1, dtype=jnp.int32)[None]
    logits = np.asarray(
        llm.engine.model.sequence_logits(  # type: ignore[attr-defined]
            llm.engine.params, jnp.asarray([tokens], jnp.int32), positions
        )[0],
        np.float64,
    )
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def scored(llm: LLM, context: list[int], continuation: list[int]):
    """(log-probability, greedy), from a forward pass."""
    rows = logprobs(llm, [*context, *continuation])[-len(continuation) :]
    total = sum(row[token] for row, token in zip(rows, continuation, strict=True))
    return total, rows.argmax(axis=1).tolist() == continuation


def test_it_is_registered() -> None:
    assert get_model("jaxserve") is JaxserveLM


def test_loglikelihoods_are_those_of_a_forward_pass(lm, llm) -> None:
    pairs = [(QUESTION, city) for city in CITIES] + [("", "Paris is"), ("A b ", "c")]
    found = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    encode = llm.get_tokenizer().encode
    for (context, continuation), answer in zip(pairs, found, strict=True):
        head = encode(context.rstrip()) if context else [lm.prefix_token_id]
        whole = encode((context + continuation) if context else continuation)
        tail = whole[len(head) :] if context else whole
        total, greedy = scored(llm, head, tail)
        assert answer[0] == pytest.approx(total, abs=2e-3) and answer[1] == greedy
    assert found[0][1] and not found[1][1]


def test_a_long_context_loses_its_beginning(lm, llm) -> None:
    words = " ".join(["and so on"] * 40)
    pair = requests("loglikelihood", (words, " and"))
    ((total, _),) = lm.loglikelihood(pair, disable_tqdm=True)
    ids = llm.get_tokenizer().encode(words + " and")
    assert total == pytest.approx(scored(llm, ids[-63:-1], ids[-1:])[0], abs=2e-3)
    with pytest.raises(ValueError, match="must be shorter than 63"):
        lm.loglikelihood(requests("loglikelihood", ("a", words)), disable_tqdm=True)


def test_a_rolling_text_counts_every_token_once(lm, llm) -> None:
    short, long = "Paris is a city.", " ".join(f"one {i}" for i in range(60))
    texts = requests("loglikelihood_rolling", (short,), (long,))
    found = lm.loglikelihood_rolling(texts, disable_tqdm=True)
    ids = llm.get_tokenizer().encode(short)
    expected = scored(llm, [lm.prefix_token_id], ids)[0]
    assert found[0] == pytest.approx(expected, abs=2e-3)
    ids = llm.get_tokenizer().encode(long)
    assert len(ids) > 2 * 62
    # By 62: each window is conditioned on as many tokens as fit before it.
    expected = scored(llm, [lm.prefix_token_id], ids[:62])[0]
    for start in range(62, len(ids), 62):
        part = ids[start : start + 62]
        context = ids[start + len(part) - 63 : start]
        expected += scored(llm, context, part)[0]
    assert found[1] == pytest.approx(expected, abs=1e-2)


def test_generation_stops_at_until(lm, llm) -> None:
    asked = requests(
        "generate_until",
        (QUESTION, {"until": [","], "max_gen_toks": 12}),
        (QUESTION, {"until": ["\n"], "do_sample": False}),
        (QUESTION, {"until": [], "max_new_tokens": 3}),
    )
    stopped, default, short = lm.generate_until(asked, disable_tqdm=True)
    encode = llm.get_tokenizer().encode
    whole = llm.generate(QUESTION, lm._sampling({"max_gen_toks": 12}), use_tqdm=False)
    text = whole[0].outputs[0].text
    assert stopped == text.split(",")[0] and "Paris" in stopped
    assert len(encode(default)) <= 8 and text.startswith(short)
    assert len(encode(short)) == 3


def test_generation_arguments_are_honoured_or_refused(lm) -> None:
    params = lm._sampling({"do_sample": True, "temperature": 0.5, "top_p": 0.9})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 8)
    assert lm._sampling({"until": "x"}).stop_strings == ("x",)
    with pytest.raises(ValueError, match="num_beams"):
        lm._sampling({"num_beams": 4})
    with pytest.raises(ValueError, match="leaves -36 tokens"):
        request = requests("generate_until", (QUESTION, {"max_gen_toks": 100}))
        lm.generate_until(request, disable_tqdm=True)


def test_conversations_are_in_the_checkpoints_template(lm, llm) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    tokenizer = llm.get_tokenizer()
    closed = tokenizer.apply_chat_template(chat[:1], tokenize=False)
    assert lm.apply_chat_template(chat[:1]) == closed
    assert lm.apply_chat_template(chat, add_generation_prompt=False) == closed + "Well"
    assert lm.chat_template(True) == tokenizer.chat_template
    assert lm.chat_template(False) is None


def test_a_model_is_named_or_given(llm) -> None:
    for wrong in ({}, {"pretrained": "x", "llm": llm}, {"llm": llm, "seed": 1}):
        with pytest.raises(ValueError, match="give one of both"):
            JaxserveLM(**wrong)


def test_lm_eval_runs_local_tasks(lm, tmp_path) -> None:
    rows = [
        {"question": QUESTION, "choices": CITIES, "answer": 0},
        {"question": "One, two, three,", "choices": [" four", " nine"], "answer": 0},
        {
            "question": "The opposite of hot is",
            "choices": [" red", " cold"],
            "answer": 0,
        },
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
    }
    data |= {"test_split": "test", "doc_to_text": "{{question}}"}
    choice = {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    generation = {
        "task": "generation",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": [".", ","], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match"}],
    }
    results = simple_evaluate(
        model=lm, tasks=[data | choice, data | generation], bootstrap_iters=0
    )
    # The last row's answer is wrong on purpose.
    assert results["results"]["choice"]["acc,none"] == pytest.approx(2 / 3)
    answers = [s["resps"][0][0] for s in results["samples"]["generation"]]
    assert answers[0].startswith(" Paris")
