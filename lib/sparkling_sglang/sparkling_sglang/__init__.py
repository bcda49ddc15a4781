"""SGLang plugin of the Sparkling notebooks (entry-point group ``sglang.srt.plugins``).

Without a ``SPARKLING_*`` switch and off the CPU engine, :func:`register` returns after reading the
environment: nothing is imported, patched or written.
"""

from __future__ import annotations

__version__ = "0.1.0"


def register() -> None:
    """Entry point that SGLang calls in its main, scheduler and detokenizer processes."""
    from sparkling_sglang import plugin

    plugin.register()
