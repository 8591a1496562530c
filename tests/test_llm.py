"""LLM: prompts as users write them, text, stop strings, log-probabilities, errors."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.models import smollm2_path
from tests.test_docs import DOCS, examples

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LAWS = "The three laws of motion were stated by"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        smollm2_path(),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        num_blocks=64,
        max_logprobs=4,
    )


def text(outputs: list) -> str:
    return outputs[0].outputs[0].text


def test_chat_answers(llm: LLM) -> None:
    (output,) = llm.chat(FRANCE, GREEDY, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.text == "The capital of France is Paris."
    assert completion.finish_reason == "stop" and completion.stop_reason is None
    tokenizer = llm.get_tokenizer()
    assert completion.token_ids[-1] in tokenizer.eos_ids
    assert tokenizer.decode(completion.token_ids) == completion.text
    assert output.prompt_token_ids == tokenizer.apply_chat_template(FRANCE)
    assert output.prompt == tokenizer.apply_chat_template(FRANCE, tokenize=False)


def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    prompt = "The three laws of motion were stated by"
    ids = llm.get_tokenizer().encode(prompt)
    forms = [
        prompt,
        ids,
        {"prompt": prompt},
        {"prompt_token_ids": ids},
        {"prompt": prompt, "cache_salt": "a"},
    ]
    together = llm.generate(forms, GREEDY, use_tqdm=False)
    expected = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert [o.outputs[0].token_ids for o in together] == [expected] * len(forms)
    assert [o.prompt for o in together] == [prompt, None, prompt, None, prompt]
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].prompt_token_ids == ids


def test_parameters_for_each_prompt_keep_their_order(llm: LLM) -> None:
    lengths = [9, 1, 5]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in lengths]
    outputs = llm.generate(["One", "Two", "Three"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    with pytest.raises(ValueError, match="sampling_params has 2 entries for 3 prompts"):
        llm.generate(["One", "Two", "Three"], params[:2])


def test_a_stop_string_across_tokens_is_cut_off(llm: LLM) -> None:
    stop = dataclasses.replace(GREEDY, stop=["ance is"])
    (output,) = llm.chat(FRANCE, stop, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.text == "The capital of Fr"
    assert completion.finish_reason == "stop" and completion.stop_reason == "ance is"
    assert (
        llm.get_tokenizer().decode(completion.token_ids) == "The capital of France is"
    )
    late = dataclasses.replace(stop, min_tokens=7)
    assert text(llm.chat(FRANCE, late, use_tqdm=False)) == (
        "The capital of France is Paris."
    )


def test_stop_token_ids_stop_under_ignore_eos(llm: LLM) -> None:
    (paris,) = llm.get_tokenizer().encode(" Paris")
    params = dataclasses.replace(GREEDY, stop_token_ids=[paris], ignore_eos=True)
    completion = llm.chat(FRANCE, params, use_tqdm=False)[0].outputs[0]
    assert completion.stop_reason == paris and completion.token_ids[-1] == paris
    assert completion.text == "The capital of France is"


def test_logprobs_are_a_distribution_in_order(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, logprobs=4)
    completion = llm.chat(FRANCE, params, use_tqdm=False)[0].outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        values = [logprob.logprob for logprob in entry.values()]
        assert list(entry)[0] == token and entry[token].rank == 1  # greedy
        assert [x.rank for x in entry.values()] == [1, 2, 3, 4]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-5
    decoded = "".join(
        entry[token].decoded_token or ""
        for token, entry in zip(
            completion.token_ids[:-1], completion.logprobs[:-1], strict=True
        )
    )
    assert decoded == completion.text


def test_prompt_logprobs_are_those_of_the_output(llm: LLM) -> None:
    """The same tokens as a prompt, in chunks, and as an output, one at a time."""
    params = dataclasses.replace(GREEDY, logprobs=3, max_tokens=16)
    (made,) = llm.generate(LAWS, params, use_tqdm=False)
    completion = made.outputs[0]
    assert completion.logprobs is not None
    ids = [*made.prompt_token_ids, *completion.token_ids]
    asked = dataclasses.replace(GREEDY, prompt_logprobs=3, max_tokens=1)
    (scored,) = llm.generate(ids, asked, use_tqdm=False)
    assert scored.prompt_logprobs is not None and scored.num_cached_tokens == 0
    assert scored.prompt_logprobs[0] is None
    rows = scored.prompt_logprobs[len(made.prompt_token_ids) :]
    for mine, output in zip(rows, completion.logprobs, strict=True):
        assert mine is not None and list(mine) == list(output)
        for one, two in zip(mine.values(), output.values(), strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-3)
            assert (one.rank, one.decoded_token) == (two.rank, two.decoded_token)
    assert completion.cumulative_logprob == pytest.approx(
        sum(row[t].logprob for row, t in zip(rows, completion.token_ids, strict=True)),  # type: ignore[index]
        abs=1e-2,
    )


def test_bad_words_and_biases_by_text(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    words = dataclasses.replace(GREEDY, bad_words=["Paris"])
    assert "Paris" not in text(llm.chat(FRANCE, words, use_tqdm=False))
    (lyon,) = tokenizer.encode(" London", add_special_tokens=False)
    bias = dataclasses.replace(GREEDY, logit_bias={lyon: 30.0}, presence_penalty=2.0)
    assert "London" in text(llm.chat(FRANCE, bias, use_tqdm=False))
    yes_no = [tokenizer.encode(word)[0] for word in ("Yes", "No")]
    only = dataclasses.replace(GREEDY, allowed_token_ids=yes_no, max_tokens=1)
    assert text(llm.chat(FRANCE, only, use_tqdm=False)) in ("Yes", "No")


def test_what_the_text_holds(llm: LLM) -> None:
    said = "The capital of France is Paris."

    def answer(**fields) -> str:
        params = dataclasses.replace(GREEDY, **fields)
        return text(llm.chat(FRANCE, params, use_tqdm=False))

    included = {"include_stop_str_in_output": True}
    assert answer(stop="ance is", **included) == "The capital of France is"
    assert answer(skip_special_tokens=False) == said
    end = answer(skip_special_tokens=False, **included)
    assert end == f"{said}<|im_end|>"
    assert answer(**included) == said
    on = answer(skip_special_tokens=False, ignore_eos=True, max_tokens=9)
    assert on.startswith(f"{said}<|im_end|>")
    assert answer(detokenize=False) == ""


def test_a_seeded_request_repeats_itself(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=12, top_p=0.9)
    alone = llm.chat(FRANCE, params, use_tqdm=False)[0].outputs[0].token_ids
    mates = [SamplingParams(temperature=1.0, max_tokens=12)] * 5
    crowd = llm.chat([FRANCE] * 6, [*mates, params], use_tqdm=False)
    assert crowd[5].outputs[0].token_ids == alone
    assert len({tuple(o.outputs[0].token_ids) for o in crowd[:5]}) > 1


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", "prompt 1: .*must hold at least one token"),
        ([], "prompt 1: .*must hold at least one token"),
        ([1.5], r"prompt 1: prompt_token_ids\[0\]=1.5 must be an integer"),
        ([49152], "49152 must be an integer in"),
        ([1] * 256, "256 tokens.*max_model_len=256"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "either prompt or prompt_token_ids"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt='' must be a non-empty"),
        ({"prompt": "a", "colour": "red"}, "colour"),
    ],
)
def test_a_bad_prompt_is_named_and_the_others_do_not_run(
    llm: LLM, prompt: object, complaint: str
) -> None:
    before = llm.stats()["output_tokens"]
    with pytest.raises(ValueError, match=complaint):
        llm.generate(["Hello", prompt], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    assert llm.stats()["output_tokens"] == before
    assert not llm.engine.has_unfinished_requests() and llm.engine.holds_nothing()
    assert len(llm.generate("Hello", GREEDY, use_tqdm=False)) == 1


def test_nothing_to_do_and_nothing_to_say(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    with pytest.raises(ValueError, match="messages=.. must hold"):
        llm.chat([], GREEDY)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="scheduling_policy='best' is unknown.*fcfs"):
        LLM("nowhere", dtype="float32", scheduling_policy="best")
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM("nowhere", dtype="float32", max_num_seq=3)


def test_slow_bfloat16_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.llm.runs_bfloat16", lambda: False)
    with (
        pytest.warns(UserWarning, match="pass dtype='float32'"),
        pytest.raises(ValueError, match="scheduling_policy"),
    ):
        LLM("nowhere", scheduling_policy="best")


ONE = SamplingParams(temperature=0.0, max_tokens=1)
WRONG = [
    {"prompt": "x", 3: 1},
    {"prompt_token_ids": np.array(5)},
    "\ud800",  # JSON can hold half of a surrogate pair
]


@pytest.mark.parametrize("prompt", WRONG, ids=["keys", "number", "half a character"])
def test_a_prompt_of_any_kind_of_wrong_is_named_and_leaves_nothing(
    llm: LLM, prompt: object
) -> None:
    try:
        with pytest.raises(ValueError, match="prompt 1"):
            llm.generate(["Hello", prompt], ONE, use_tqdm=False)  # type: ignore[list-item]
        assert llm.engine.holds_nothing()
    finally:  # the other tests share the engine
        for name in list(llm.engine._clients.live):
            llm.engine.abort_request(name)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()


def test_an_interrupt_while_prompts_are_read_leaves_none_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llm.get_tokenizer()
    real = tokenizer.encode

    def encode(text: str) -> list[int]:
        if text == "stop here":
            raise KeyboardInterrupt
        return real(text)

    monkeypatch.setattr(tokenizer, "encode", encode)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello", "stop here"], ONE, use_tqdm=False)
    before = llm.stats()["output_tokens"]
    llm.generate("Hi", ONE, use_tqdm=False)
    assert llm.stats()["output_tokens"] == before + 1


def test_arrays_are_prompts_in_a_list_as_alone(llm: LLM) -> None:
    arrays = [np.array([1, 2]), np.array([3, 4, 5])]
    outputs = llm.generate(arrays, ONE, use_tqdm=False)  # type: ignore[arg-type]
    assert [o.prompt_token_ids for o in outputs] == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize("value", [None, 5, {"Hello"}, iter(["Hello"])])
def test_prompts_that_are_none_are_refused_by_name(llm: LLM, value: object) -> None:
    with pytest.raises(ValueError, match="prompts.*must"):
        llm.generate(value, ONE, use_tqdm=False)  # type: ignore[arg-type]


def test_one_message_alone_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(ValueError, match="messages.*must"):
        llm.chat({"role": "user", "content": "Hi"}, ONE)  # type: ignore[arg-type]


def test_the_page_on_serving(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last test here: the example of docs/serving.md closes the engine."""
    monkeypatch.setattr("jaxserve.async_engine.LLM", lambda path: llm)
    exec(examples(DOCS / "serving.md")[0], {"__name__": "example"})
    answer, *completed = capsys.readouterr().out.splitlines()
    assert answer == "The capital of France is Paris."
    assert sum(" and " in line and " is -> " in line for line in completed) == 3
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("Hello", ONE, use_tqdm=False)
