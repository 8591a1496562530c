"""Attention and linear kernels over paged KV; nothing of jaxserve is imported."""

from pallas_kernels.api import paged_attention, rotary_attention, write_kv
from pallas_kernels.arguments import EVERYTHING

__all__ = ["EVERYTHING", "paged_attention", "rotary_attention", "write_kv"]
