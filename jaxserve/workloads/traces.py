"""Readers of public trace formats: a path in, a workload out.

Owns the formats. Every error names file, line, column, rule and remedy. Times start
where the file's do, save for wall clocks, which start at 0.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.workloads.jobs import Chain, Job, Workload

Path = str | os.PathLike[str]

_MEND = "mend the line or leave it out"
_CLOCK = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?"
)


def read_azure(path: Path) -> Workload:
    """Azure's LLM inference traces of 2023 (Splitwise, ISCA 2024) and 2024 (DynamoLLM).

    Columns TIMESTAMP (wall clock in UTC, up to 9 digits of a second), ContextTokens,
    GeneratedTokens.
    """
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    rows = [
        (
            _clock_ns(where, "TIMESTAMP", row["TIMESTAMP"]),
            _whole(where, "ContextTokens", row["ContextTokens"], 1),
            _whole(where, "GeneratedTokens", row["GeneratedTokens"], 1),
        )
        for where, row in _csv(path, columns)
    ]
    start_ns = min((ns for ns, _, _ in rows), default=0)
    return _in_order(path, (Job((ns - start_ns) / 1e9, i, o) for ns, i, o in rows))


def read_burstgpt(path: Path) -> Workload:
    """BurstGPT (Wang et al., KDD 2025).

    Columns Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens,
    Log Type. Model and log type become the tags "model" and "log_type". Requests that
    failed, which the trace marks by 0 response tokens, are left out, and so are those
    of 0 request tokens.
    """
    columns = ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type")
    jobs = []
    for where, row in _csv(path, columns):
        prompt = _whole(where, "Request tokens", row["Request tokens"], 0)
        output = _whole(where, "Response tokens", row["Response tokens"], 0)
        time = _real(where, "Timestamp", row["Timestamp"])
        if prompt and output:
            tags = {"model": row["Model"], "log_type": row["Log Type"]}
            jobs.append(Job(time, prompt, output, tags=tags))
    return _in_order(path, jobs)


def read_vtc_arena(path: Path) -> Workload:
    """The LMSYS Arena trace of VTC (Sheng et al., OSDI 2024) as CSV.

    Columns req_time_s, client, prompt_len, output_len; the client becomes the user.
    """
    columns = ("req_time_s", "client", "prompt_len", "output_len")
    jobs = [
        Job(
            _real(where, "req_time_s", row["req_time_s"]),
            _whole(where, "prompt_len", row["prompt_len"], 1),
            _whole(where, "output_len", row["output_len"], 1),
            user=row["client"],
        )
        for where, row in _csv(path, columns)
    ]
    return _in_order(path, jobs)


def read_mooncake(path: Path, *, block_tokens: int = 512) -> Workload:
    """Mooncake's traces (Qin et al., FAST 2025), JSON lines, gzipped or not.

    Keys timestamp (milliseconds), input_length, output_length, hash_ids: an id for each
    block of the prompt, chained, the cut last block with an id or without one.

    The conversation trace is stamped every 3 s or so: give it other arrivals
    (`with_arrivals`) before measuring a TTFT.

    Args:
      block_tokens: tokens of a block, 512 in Mooncake's own files.
    """
    jobs = []
    for where, row in _json_lines(path):
        prompt = _whole(where, "input_length", row.get("input_length"), 1)
        output = _whole(where, "output_length", row.get("output_length"), 1)
        ids = row.get("hash_ids")
        if not isinstance(ids, list):
            raise ValueError(
                f"{where}: hash_ids={ids!r} must be a list of block ids; {_MEND}"
            )
        chain = tuple(_whole(where, "hash_ids", i, 0) for i in ids)
        whole = prompt // block_tokens
        if len(chain) not in (whole, -(-prompt // block_tokens)):
            raise ValueError(
                f"{where}: hash_ids of length {len(chain)} must name each block of "
                f"{block_tokens} tokens of input_length={prompt}; set block_tokens to "
                "the trace's"
            )
        time = _real(where, "timestamp", row.get("timestamp")) / 1000
        jobs.append(Job(time, prompt, output, chain=Chain(chain, block_tokens)))
    return _in_order(path, jobs)


class Outputs(NamedTuple):
    """Output lengths with what a predictor said of them, row by row."""

    tokens: tuple[int, ...]
    tags: tuple[Mapping[str, str], ...]


def read_lmsys_outputs(path: Path) -> Outputs:
    """Output lengths of LMSYS-Chat-1M with a BERT model's predictions (SSJF, 2024).

    Columns output_tokens, pred_binary_class, pred_multi_class. The predicted classes,
    larger ones for longer outputs, become tags of these names.
    """
    classes = ("pred_binary_class", "pred_multi_class")
    tokens, tags = [], []
    for where, row in _csv(path, ("output_tokens", *classes)):
        tokens.append(_whole(where, "output_tokens", row["output_tokens"], 1))
        tags.append({c: str(_whole(where, c, row[c], 0)) for c in classes})
    if not tokens:
        raise ValueError(f"{path}: no rows follow the header; give the whole file")
    return Outputs(tuple(tokens), tuple(tags))


def _csv(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields "file:line" and the row's cells by column."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for column in columns:
            if column not in (reader.fieldnames or ()):
                raise ValueError(
                    f"{path}:1: column {column!r} is missing; the header must name "
                    f"{list(columns)}"
                )
        for row in reader:
            where = f"{path}:{reader.line_num}"
            for column in columns:
                if row[column] is None:
                    raise ValueError(
                        f"{where}: {column} is missing, the line is too short; {_MEND}"
                    )
            yield where, row


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    opened = gzip.open if os.fspath(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: no JSON ({error}); {_MEND}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: {row!r} must be a JSON object; {_MEND}")
            yield where, row


def _in_order(path: Path, jobs: Iterable[Job]) -> Workload:
    workload = tuple(sorted(jobs, key=lambda job: job.arrival_s))
    if not workload:
        raise ValueError(f"{path}: it holds no requests; give the whole file")
    return workload


def _whole(where: str, column: str, cell: object, low: int) -> int:
    try:
        value = int(cell) if isinstance(cell, str) else cell
    except ValueError:
        value = None
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(
            f"{where}: {column}={cell!r} must be an integer >= {low}; {_MEND}"
        )
    return value


def _real(where: str, column: str, cell: object) -> float:
    try:
        value = float(cell) if isinstance(cell, str | int | float) else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{where}: {column}={cell!r} must be a number; {_MEND}")
    return value


def _clock_ns(where: str, column: str, cell: str) -> int:
    """Nanoseconds since the epoch, exactly: floats would lose the last digits."""
    match = _CLOCK.fullmatch(cell)
    try:
        second = datetime.datetime.fromisoformat(f"{match[1]}+00:00") if match else None
    except ValueError:
        second = None
    if match is None or second is None:
        raise ValueError(
            f"{where}: {column}={cell!r} must be a UTC time such as "
            f"2023-11-16 18:17:03.9799600; {_MEND}"
        )
    return int(second.timestamp()) * 10**9 + int((match[2] or "0").ljust(9, "0"))
