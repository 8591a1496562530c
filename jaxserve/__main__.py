"""One answer from the shell: python -m jaxserve --prompt "..."."""

from __future__ import annotations

import sys

from absl import app, flags, logging

from jaxserve import LLM, SamplingParams
from jaxserve.llm import runs_bfloat16
from jaxserve.models import smollm2_path

_PROMPT = flags.DEFINE_string("prompt", None, "What to ask.")
_MODEL = flags.DEFINE_string(
    "model", None, "Directory, .gguf file or hub name; default SmolLM2-135M-Instruct."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["bfloat16", "float32"], "Of weights and cache; default the faster."
)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 256, "Most output tokens.", lower_bound=1
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", None, "Fixes the random stream.")
_RAW = flags.DEFINE_bool("raw", False, "Complete the prompt; no chat template.")

_EXAMPLE = 'python -m jaxserve --prompt "Why is the sky blue?"'


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; use {_EXAMPLE}")
    if _PROMPT.value is None:
        raise app.UsageError(f"no prompt is given; use {_EXAMPLE}")
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    llm = LLM(
        _MODEL.value or smollm2_path(),
        dtype=_DTYPE.value or ("bfloat16" if runs_bfloat16() else "float32"),
        max_num_seqs=8,
    )
    tokenizer = llm.get_tokenizer()
    prompt = _PROMPT.value
    ids = (
        tokenizer.encode(prompt)
        if _RAW.value
        else tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    )
    params = SamplingParams(
        temperature=_TEMPERATURE.value, max_tokens=_MAX_TOKENS.value, seed=_SEED.value
    )
    llm.engine.add_request("0", ids, params)
    shown = 0
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            text = output.outputs[0].text
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
    sys.stdout.write("\n")


if __name__ == "__main__":
    app.run(main)
