"""Attention and linear kernels over paged KV; nothing of jaxserve is imported."""

from pallas_kernels.api import paged_attention, rotary_attention, write_kv

__all__ = ["paged_attention", "rotary_attention", "write_kv"]
