"""LLM: a model and an engine for offline use, with text in and out.

Owns the order of prompts, progress bars and the compilation cache. Never sees a plan or
a launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from tqdm import tqdm

from jaxserve.config import EngineConfig
from jaxserve.core import Event
from jaxserve.engine import Engine, Update
from jaxserve.executors.jax_executor import JaxExecutor
from jaxserve.models import load
from jaxserve.models.base import Params
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.outputs import RequestOutput
from jaxserve.prompts import Message, Prompt, needed, read, render
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.policies import Policy, check_is_policy, get_policy


class LLM:
    """A checkpoint, ready to generate.

    Args:
      model: a Hugging Face directory, a .gguf file, or a name on the Hugging Face hub;
        docs/models.md lists the families.
      dtype: "bfloat16" or "float32", of weights and KV cache.
      max_model_len, max_num_seqs, max_num_batched_tokens, block_size, num_blocks,
        enable_prefix_caching, num_scheduler_steps, launches_in_flight, seed and
        engine_options: see `EngineConfig`.
      scheduling_policy: a policy, or one by name: "fcfs", "mlfq", "sjf:history",
        "priority(aging_s=5)", "my_file:my_policy"; see docs/policies.md.
      warmup: compile every launch shape now rather than when it is first needed.
      on_event: called with every `core.Event`, in order.

    Compiled programs are kept in JAX's persistent cache. Where none is configured, LLM
    configures $XDG_CACHE_HOME/jaxserve (~/.cache/jaxserve).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "bfloat16",
        max_model_len: int = 2048,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        num_blocks: int | None = None,
        enable_prefix_caching: bool = True,
        num_scheduler_steps: int = 1,
        launches_in_flight: int = 1,
        scheduling_policy: str | Policy = "fcfs",
        seed: int = 0,
        warmup: bool = False,
        on_event: Callable[[Event], None] | None = None,
        **engine_options: Any,
    ):
        _keep_compiled_programs()
        if dtype == "bfloat16" and not runs_bfloat16():
            warnings.warn(
                f"JAX {jax.__version__} runs bfloat16 on CPUs many times slower than "
                "float32; pass dtype='float32', or use JAX 0.11 (Python 3.12) or later",
                stacklevel=2,
            )
        policy = scheduling_policy
        if isinstance(policy, str):
            policy = get_policy(policy)
        check_is_policy("scheduling_policy", policy)
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            num_scheduler_steps=num_scheduler_steps,
            launches_in_flight=launches_in_flight,
            seed=seed,
            **engine_options,
        )
        decoder, params, self.tokenizer = load(model, dtype, max_model_len)
        longest = decoder.config.context_length
        if max_model_len > longest:
            raise ValueError(
                f"max_model_len={max_model_len} must not exceed {longest}, the length "
                "that the model was made for; pass that or less"
            )
        self.engine = Engine(
            decoder, params, config, policy, self.tokenizer, on_event=on_event
        )
        self._ids = itertools.count()
        if warmup:
            executor = cast(JaxExecutor, self.engine.executor)
            executor.warmup(
                lambda shapes: tqdm(
                    shapes, desc="Compiling", disable=None, leave=False
                ),
                transfers=self.engine.swaps,
            )

    def close(self) -> None:
        """Write cached blocks to disk, if there is one, and stop (`Engine.close`)."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        user: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or several; outputs in the order of the prompts.

        Args:
          prompts: each a text, a list of token ids, or a mapping with `prompt` or
            `prompt_token_ids`, and perhaps `cache_salt`.
          sampling_params: for all prompts, or one each. Outputs are whole, whatever
            their `output_kind`.
          use_tqdm: show progress, if standard error is a terminal.
          priority, user: for all prompts, or one each.

        Raises:
          ValueError: a prompt or its parameters cannot be served. The message says
            which; none of the call's prompts runs.
        """
        many = _as_list(prompts)
        columns = zip(
            many,
            _each("sampling_params", sampling_params, len(many)),
            _each("priority", priority, len(many)),
            _each("user", user, len(many)),
            strict=True,
        )
        ids: list[str] = []
        try:
            for i, (prompt, params, level, who) in enumerate(columns):
                ids.append(self._submit(i, prompt, params, level, who))
        except BaseException:  # an interrupt too: none of the call's prompts runs
            self._abort(ids)
            self._run(ids, show=False)
            raise
        return self._run(ids, show=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the model's own chat template.

        Args:
          messages: `{"role": ..., "content": ...}` mappings; or a list of such lists.
          sampling_params, options: as in `generate`.
        """
        if not messages:
            raise ValueError("messages=[] must hold at least one message")
        if not isinstance(messages, Sequence):
            raise ValueError(
                f"messages of type {type(messages).__name__} must be a list of "
                "messages, or of such lists; put a single message in a list"
            )
        one = isinstance(messages[0], Mapping)
        conversations = [messages] if one else messages
        chats = [cast(Sequence[Message], c) for c in conversations]
        rendered: list[Prompt] = [render(chat, self.tokenizer) for chat in chats]
        return self.generate(rendered, sampling_params, **options)

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; ValueError if it came without one."""
        return needed(self.tokenizer)

    def stats(self) -> dict[str, int | float]:
        """The engine's counters and gauges."""
        return self.engine.stats()

    def update_params(self, params: Params, mode: Update = "wait") -> int:
        """Serve with other weights from now on; the new weight version.

        Args:
          params, mode: as in `Engine.update_params`; `models.load(path, dtype)[1]` are
            those of another checkpoint of the same model.
        """
        return self.engine.update_params(params, mode)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block."""
        self.engine.reset_prefix_cache()

    def _submit(
        self,
        position: int,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int | None,
        user: str | None,
    ) -> str:
        name = f"prompt {position}"
        text, token_ids, salt = read(name, prompt, self.tokenizer)
        if params is None or isinstance(params, SamplingParams):  # else: refused below
            params = dataclasses.replace(
                params or SamplingParams(), output_kind="final_only"
            )
        request_id = str(next(self._ids))
        try:
            self.engine.add_request(
                request_id,
                token_ids,
                params,
                priority=0 if priority is None else priority,
                user=user,
                cache_salt=salt,
                prompt=text,
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return request_id

    def _abort(self, ids: Collection[str]) -> None:
        """End them all, even if a callback that hears of it raises."""
        for request_id in ids:
            with contextlib.suppress(Exception):
                self.engine.abort_request(request_id)

    def _run(self, ids: Sequence[str], *, show: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        left, tokens = set(ids), 0
        bar = tqdm(total=len(ids), desc="Requests", disable=None if show else True)
        try:
            while left:
                for output in self.engine.step():
                    if output.finished and output.request_id in left:
                        left.remove(output.request_id)
                        done[output.request_id] = output
                        tokens += sum(len(o.token_ids) for o in output.outputs)
                        seconds = bar.format_dict["elapsed"] or 1e-9
                        bar.set_postfix_str(f"{tokens / seconds:.0f} output tok/s")
                        bar.update()
        finally:
            bar.close()
            self._abort(left)  # interrupted: a later call starts afresh
        return [done[request_id] for request_id in ids]


def runs_bfloat16() -> bool:
    """Whether bfloat16 is the faster dtype here: anywhere but on CPUs before JAX 0.11.

    There XLA converts the weights and the whole cache to float32 in every step.
    """
    return jax.default_backend() != "cpu" or jax.__version_info__ >= (0, 11)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping | np.ndarray):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValueError(
            f"prompts of type {type(prompts).__name__} must be a prompt or a list of "
            "prompts; a prompt is a text, a list of token ids or a mapping"
        )
    kinds = str | Mapping | Sequence | np.ndarray
    if len(prompts) and not isinstance(prompts[0], kinds):
        return [cast(Prompt, prompts)]  # one list of token ids
    return list(cast(Sequence[Prompt], prompts))


def _each(name: str, value: Any, n: int) -> Iterator[Any] | list[Any]:
    """`value` for each of n prompts."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != n:
            raise ValueError(
                f"{name} has {len(value)} entries for {n} prompts; give one for all, "
                "or one each"
            )
        return list(value)
    return [value] * n


def _keep_compiled_programs() -> None:
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(base) / "jaxserve"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
