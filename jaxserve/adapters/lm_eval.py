"""A model for EleutherAI's lm-eval (extra `lm-eval`), under the name "jaxserve".

Owns its questions in an engine's terms: what a continuation is worth, and what follows
a context. Never sees a task or a metric. From the shell:

    python -m jaxserve.adapters.lm_eval run --model jaxserve --tasks ... \\
        --model_args pretrained=DIRECTORY
"""

# The library is an extra, which most checkouts do without.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxserve.llm import LLM
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

Scored = tuple[Any, list[int], list[int]]
"""What lm-eval caches an answer by (None: nothing), context and continuation."""


@register_model("jaxserve")
class JaxserveLM(TemplateLM):
    """lm-eval's `LM` on an `LLM`.

    Requests of a call are served together, so that batch sizes are the engine's
    (`max_num_seqs`), and a context that many share is computed once to generate.

    Args:
      pretrained: what `LLM` loads. Or llm: one that is loaded.
      max_gen_toks: most tokens generated where a task does not say.
      prefix_token_id: what a text that is scored from its start follows; default BOS,
        or else the tokenizer's end of sequence.
      batch_size, max_batch_size, device: of lm-eval's command line; not used.
      options: of `LLM`, such as max_model_len, dtype, max_num_seqs, seed.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        llm: LLM | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | str | None = None,
        device: str | None = None,
        **options: Any,
    ):
        del batch_size, max_batch_size, device
        super().__init__()
        if pretrained is not None and llm is None:
            llm = LLM(pretrained, **options)
        elif pretrained is not None or llm is None or options:
            raise ValueError(
                f"pretrained={pretrained!r} must name a model, with the options of an "
                f"LLM ({list(options)}), or llm be one that is loaded; give one of both"
            )
        self.llm = llm
        self.tokenizer = self.llm.get_tokenizer()
        self._name = "jaxserve" if pretrained is None else str(pretrained)
        self._max_gen_toks = int(max_gen_toks)
        self._prefix_token_id = prefix_token_id

    @property
    def max_length(self) -> int:
        """Tokens of context and continuation together: one is always sampled."""
        return self.llm.engine.config.max_model_len - 1

    @property
    def max_gen_toks(self) -> int:
        """Most tokens generated where a task does not say."""
        return self._max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """An end-of-sequence id of the tokenizer."""
        return self.tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What a text that is scored from its start follows."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos_id = self.tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; one BOS where the checkpoint wants one."""
        del kwargs
        return self.tokenizer.encode(string, add_special_tokens is not False)

    @property
    def tokenizer_name(self) -> str:
        """Of the checkpoint, for lm-eval's cache of requests."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The checkpoint's own, which is the only one offered; None: none is used."""
        return self.tokenizer.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text; without a generation prompt its last message stays
        open, to be continued."""
        text = self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt, tokenize=False
        )
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each text from its start; windows where it is long."""
        scored: list[Scored] = []
        counts = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            counts.append(len(pairs))
            scored += pairs
        values = iter(self._loglikelihood_tokens(scored, disable_tqdm))
        totals = [sum(next(values)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """What follows each context, up to a text of `until`; greedy by default.

        A context that leaves no room for `max_gen_toks` loses its beginning.
        """
        prompts, sampling = [], []
        for request in requests:
            context, asked = request.args
            params = self._sampling(asked)
            sampling.append(params)
            room = self.max_length + 1 - (params.max_tokens or 0)
            prompts.append(self._fitting(self.tok_encode(context), room))
        outputs = self._serve(prompts, sampling, disable_tqdm)
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """For each continuation its log-probability, and whether it is the greedy one.

        Raises ValueError for a continuation that does not fit behind one token.
        """
        del kwargs
        prompts = []
        for _, context, continuation in requests:
            if len(continuation) >= self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens must be shorter "
                    f"than {self.max_length}; raise max_model_len"
                )
            room = self.max_length - len(continuation)
            prompts.append([*self._fitting(context, room), *continuation])
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )
        outputs = self._serve(prompts, [params] * len(prompts), disable_tqdm)
        answers = []
        for (key, _, continuation), output in zip(requests, outputs, strict=True):
            answers.append(_score(continuation, output))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answers[-1])
        return answers

    def _sampling(self, asked: Mapping[str, Any]) -> SamplingParams:
        """Of a task's `generation_kwargs`; names that are not known are refused."""
        fields = dict(normalize_gen_kwargs(dict(asked), self.max_gen_toks))
        fields.pop("do_sample", None)
        fields.setdefault("temperature", 0.0)
        fields["max_tokens"] = fields.pop("max_gen_toks")
        fields["stop"] = [text for text in fields.pop("until") if text]
        try:
            return SamplingParams(**fields)
        except TypeError as error:
            raise ValueError(f"generation_kwargs={dict(asked)}: {error}") from None

    def _fitting(self, tokens: list[int], room: int) -> list[int]:
        """The last tokens of a context, as many as there is room for."""
        if room < 1:
            raise ValueError(
                f"max_gen_toks leaves {room} tokens of {self.max_length + 1} for the "
                "context; lower it or raise max_model_len"
            )
        if len(tokens) > room:
            _log.warning(
                "a context of %d tokens loses its first %d, to fit in max_model_len=%d",
                len(tokens),
                len(tokens) - room,
                self.max_length + 1,
            )
        return tokens[-room:]

    def _serve(
        self,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        disable_tqdm: bool,
    ) -> Iterable[RequestOutput]:
        return self.llm.generate(prompts, sampling, use_tqdm=not disable_tqdm)


def _score(continuation: Sequence[int], output: RequestOutput) -> tuple[float, bool]:
    told = output.prompt_logprobs or []
    entries = [
        entry[token]
        for token, entry in zip(
            continuation, told[len(told) - len(continuation) :], strict=True
        )
        if entry is not None
    ]
    total = sum(entry.logprob for entry in entries)
    return total, all(entry.rank == 1 for entry in entries)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
