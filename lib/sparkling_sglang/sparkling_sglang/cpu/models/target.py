"""Ling-3.0."""

from sglang.srt.models.bailing_moe_v3 import EntryClass

__all__ = ["EntryClass"]
