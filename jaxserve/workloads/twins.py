"""Twins of public traces: their quantiles as a table, and workloads drawn from it.

Owns the tables. A twin has the trace's length distributions, rate and burstiness; its
prompt and output lengths are independent of each other and of the time of day, which
those of the trace need not be. Between quantiles it is linear, so that means are up to
7 % off the trace's, and 14 % for Azure's code outputs (31.8 tokens for 27.9). The
numbers are summaries of

- Azure LLM inference traces 2023, code and conversation (CC-BY-4.0, Microsoft; Patel et
  al., Splitwise, ISCA 2024);
- Mooncake's conversation and synthetic traces (Apache-2.0; Qin et al., FAST 2025);
- the LMSYS Arena trace of VTC (Apache-2.0; Sheng et al., OSDI 2024);
- lengths of arXiv summarization, Llama 2 tokens (MIT; Agrawal et al., Vidur, MLSys
  2024);
- output lengths of LMSYS-Chat-1M, vicuna-13b, at most 511 (Apache-2.0; Qiu et al.,
  SSJF, 2024).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.workloads import arrivals, checks
from jaxserve.workloads.jobs import Job, Workload, streams
from jaxserve.workloads.lengths import Lengths, from_quantiles

PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


class Twin(NamedTuple):
    """A trace in a few numbers; tokens are given at PERCENTILES.

    Attributes:
      input_tokens: None where the trace has no prompt lengths.
      rate_rps: None where it has no times.
      gap_cv: coefficient of variation of the gaps between arrivals; None where it has
        no times, or such as hide it.
    """

    output_tokens: tuple[int, ...]
    input_tokens: tuple[int, ...] | None = None
    rate_rps: float | None = None
    gap_cv: float | None = None

    @property
    def outputs(self) -> Lengths:
        """The distribution of output lengths."""
        return from_quantiles(PERCENTILES, self.output_tokens)

    @property
    def inputs(self) -> Lengths:
        """The distribution of prompt lengths; ValueError where the trace has none."""
        if self.input_tokens is None:
            raise ValueError(
                "input_tokens=None: the trace has output lengths only; draw prompts "
                "from a distribution of jaxserve.workloads.lengths"
            )
        return from_quantiles(PERCENTILES, self.input_tokens)

    def arrivals(self, n: int, rate_rps: float, rng: np.random.Generator) -> np.ndarray:
        """f64[n] seconds: gamma gaps of the trace's CV, Poisson where it is unknown."""
        return arrivals.gamma(n, rate_rps, self.gap_cv or 1.0, rng)


TWINS: dict[str, Twin] = {
    "azure23_code": Twin(
        input_tokens=(3, 17, 75, 147, 578, 1469, 2744, 5187, 7303, 7436, 7437, 7437),
        output_tokens=(6, 6, 6, 7, 9, 13, 24, 55, 90, 251, 825, 1899),
        rate_rps=2.57,
        gap_cv=13.15,
    ),
    "azure23_conv": Twin(
        input_tokens=(2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 6179, 14050),
        output_tokens=(7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 954, 1000),
        rate_rps=5.53,
        gap_cv=1.09,
    ),
    "mooncake_conv": Twin(  # its times are rounded to 3 s, which hides the gaps
        input_tokens=(891, 894, 901, 964, 2306, 6909, 15367, 27367, 39550, 85400)
        + (121300, 126195),
        output_tokens=(1, 3, 10, 24, 156, 350, 472, 597, 698, 1118, 2000, 2000),
        rate_rps=3.40,
    ),
    "mooncake_synth": Twin(
        input_tokens=(13, 16, 22, 30, 277, 11587, 23175, 38611, 48904, 66456)
        + (191373, 191378),
        output_tokens=(1, 2, 2, 4, 11, 69, 250, 389, 519, 768, 813, 893),
        rate_rps=3.91,
        gap_cv=1.01,
    ),
    "vtc_arena": Twin(
        input_tokens=(2, 2, 2, 5, 13, 40, 161, 432, 653, 902, 1014, 1021),
        output_tokens=(2, 3, 10, 17, 62, 211, 458, 513, 513, 785, 977, 977),
        rate_rps=2.50,
        gap_cv=1.10,
    ),
    "arxiv": Twin(
        input_tokens=(1, 73, 748, 1242, 1986, 2730, 3370, 3702, 3813, 3933, 4011, 4054),
        output_tokens=(5, 36, 60, 78, 115, 167, 242, 372, 736, 3271, 3844, 4056),
    ),
    "lmsys": Twin(output_tokens=(2, 2, 9, 13, 41, 140, 294, 395, 446, 502, 511, 511)),
}

ARENA_CLIENTS = (199, 40, 296, 22, 66, 120, 67, 56, 36, 23, 262, 26, 43, 44, 22, 46)
ARENA_CLIENTS += (25, 3, 12, 19, 31, 2, 19, 11, 2, 7, 1)
"""Requests of each client of the Arena trace, 0 to 26."""


def make_twin(name: str, *, n: int, seed: int, rate: float | None = None) -> Workload:
    """n requests with the trace's lengths, rate and burstiness.

    Args:
      rate: requests per second; None: the trace's own.

    Raises:
      ValueError: no trace of that name, or one without prompt lengths or, where none is
        given, without a rate.
    """
    if name not in TWINS:
        raise ValueError(f"twin {name!r} must be one of {sorted(TWINS)}")
    twin, random = TWINS[name], streams(seed)
    rate = checks.above(
        "rate",
        twin.rate_rps if rate is None else rate,
        0,
        f"give requests per second, for {name} has no times",
    )
    times = twin.arrivals(n, rate, random.arrivals)
    prompts = twin.inputs(random.prompts.random(n))
    outputs = twin.outputs(random.outputs.random(n))
    rows = zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return tuple(Job(*row) for row in rows)
