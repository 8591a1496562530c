"""What a checked call asserts of its operands before any kernel reads through them.

Each message ends where the value belongs, which is written behind it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pallas_kernels.cpu import ffi
from pallas_kernels.cpu import job as j
from pallas_kernels.cpu import vector as vec

_LONGEST = 160


_CU_Q_LENS = ffi.text(
    "cu_q_lens must start at 0, never fall and stay within the token axis; it has "
)
_KV_LENS = ffi.text(
    "kv_lens must be 0, or from the row's query tokens up to M * B; it has "
)
_TABLE = ffi.text("the table must name pages in [0, NP) up to kv_len; it names page ")
_PAGE_ID = ffi.text("page_ids must not be negative; there is ")
_OFFSET = ffi.text("offsets must be in [0, B); there is ")


@njit
def _fail(frame, message, value):
    """The error that says `message`, then `value`."""
    text = np.zeros(_LONGEST + 24, np.uint8)
    at = len(message) - 1  # over its final zero
    text[:at] = message[:at]
    if value < 0:
        text[at] = 45  # a minus sign
        at += 1
        value = -value
    digits = 1
    while value >= 10**digits:
        digits += 1
    for i in range(digits):
        text[at + digits - 1 - i] = 48 + value // 10**i % 10
    error = ffi.refuse(frame, text.ctypes.data)
    return error + text[-1]  # which is 0: keeps the text alive until here


@njit
def check_rows(frame, job, num_pages):
    """An error if a kernel would read outside the arrays, else 0."""
    columns, block = j.get(job, j.COLUMNS), j.get(job, j.BLOCK)
    before = 0
    for row in range(j.get(job, j.ROWS)):
        start = j.item(job, j.CU_Q_LENS, row)
        stop = j.item(job, j.CU_Q_LENS, row + 1)
        if start != before or stop < start or stop > j.get(job, j.TOKENS):
            return _fail(frame, _CU_Q_LENS, stop if start == before else start)
        before = stop
        kv_len = j.item(job, j.KV_LENS, row)
        if kv_len < 0 or kv_len > columns * block or 0 < kv_len < stop - start:
            return _fail(frame, _KV_LENS, kv_len)
        for column in range((kv_len + block - 1) // block):
            page = j.item(job, j.TABLE, row * columns + column)
            if page < 0 or page >= num_pages:
                return _fail(frame, _TABLE, page)
    return 0


@njit
def check_writes(frame, page_ids, offsets, tokens, num_pages, block):
    """An error if KV would be written outside the pages, else 0."""
    for token in range(tokens):
        page = vec.load_i32(page_ids + 4 * token)
        offset = vec.load_i32(offsets + 4 * token)
        if page < 0:
            return _fail(frame, _PAGE_ID, page)
        if page < num_pages and not 0 <= offset < block:
            return _fail(frame, _OFFSET, offset)
    return 0
