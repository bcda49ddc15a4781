"""Ling-3.0's NEXTN draft."""

from sglang.srt.models.bailing_moe_nextn import EntryClass

__all__ = ["EntryClass"]
