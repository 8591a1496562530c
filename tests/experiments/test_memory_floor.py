"""What memory alone allows, counted by hand."""

from __future__ import annotations

from experiments.bench_workloads import Workload
from experiments.memory_floor import decode_bytes


def test_one_request_reads_its_context_at_each_step():
    # 3 steps at contexts 4, 5 and 6.
    workload = Workload([[1, 2, 3, 4]], [3])
    assert decode_bytes(workload, 1000, 10) == 3 * 1000 + (4 + 5 + 6) * 10


def test_a_shared_prefix_is_read_once_a_step():
    # Two share 2 tokens; alone they have 1 and 2, and run 2 and 1 steps.
    workload = Workload([[7, 8, 1], [7, 8, 2, 3]], [2, 1])
    own = (1 + 2) + 2
    assert decode_bytes(workload, 100, 1) == 2 * 100 + 2 * 2 + own
