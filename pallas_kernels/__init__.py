"""Attention kernels over paged KV; imports only jax."""

from pallas_kernels.api import paged_attention, write_kv

__all__ = ["paged_attention", "write_kv"]
