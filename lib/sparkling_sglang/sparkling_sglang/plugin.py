"""What happens when SGLang loads this plugin: version gate, then the parts that are switched on."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import sys

from sparkling_sglang import __version__, switches
from sparkling_sglang.patches import Patches

KNOWN_SGLANG = ("0.5.23",)

logger = logging.getLogger("sparkling_sglang")


def refusal(found: str) -> str | None:
    """The one line that says why SGLang ``found`` is not patched, or None when it is known."""
    if found in KNOWN_SGLANG:
        return None
    known = ", ".join(KNOWN_SGLANG)
    return f"sparkling-sglang {__version__}: found SGLang {found}, knows {known}; nothing patched."


def role() -> str:
    """``main``, ``scheduler`` or ``other``: which of SGLang's processes this is.

    SGLang has not named the process yet when it loads plugins. A spawned scheduler has imported
    ``sglang.srt.managers.scheduler`` to find its entry function; the detokenizer has not.
    """
    if multiprocessing.parent_process() is None:
        return "main"
    return "scheduler" if "sglang.srt.managers.scheduler" in sys.modules else "other"


def _part(name: str):
    # During development a part may not exist yet.
    full = f"sparkling_sglang.{name}"
    return importlib.import_module(full) if importlib.util.find_spec(full) else None


def register() -> None:
    """Patch this process as far as the environment asks for it. See the package docstring."""
    wanted = switches.read()
    if wanted.idle:
        return
    from sglang.version import __version__ as found

    reason = refusal(found)
    if reason:
        logger.warning(reason)
        return
    from sparkling_sglang import fp8_head, share_head, status  # these import torch

    here = role()
    patches = Patches()
    if wanted.cpu_engine and here == "main":
        from sparkling_sglang.cpu import arguments

        arguments.register(patches)
    if wanted.fp8_head and here == "main":
        fp8_head.register_main(patches)
    if here == "scheduler":
        names = ["cpu.model", "cpu.moe", "cpu.sampling"] if wanted.cpu_engine else []
        names += ["fp8_head"] if wanted.fp8_head else []
        for name in names:
            part = _part(name)
            if part:
                part.register(patches)
        share_head.register(patches, hand_over=wanted.share_head)
        # Last, so that its hooks see what the others have done.
        status.start(patches, wanted)
    patches.apply()
