"""What happens when SGLang loads this plugin: version gate, then the parts that are switched on."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from collections.abc import Sequence

from sparkling_sglang import __version__, switches
from sparkling_sglang.patches import Patches
from sparkling_sglang.switches import Switches

_SHAPED = ("0.5.21", "0.5.22", "0.5.23")
KNOWN_SGLANG: dict[str, tuple[str, ...]] = {
    "cpu-engine": ("0.5.23",),
    "fp8-head": _SHAPED,
    "share-head": _SHAPED,
    "trap": _SHAPED,
    "clamp": _SHAPED,
    "keep-alive": _SHAPED,
    "status": _SHAPED,
}
"""Part of this plugin to the versions of SGLang that it knows.

Served with, and measured on: 0.5.23. In 0.5.21 and 0.5.22 everything that a part needs has the same
shape (:mod:`sparkling_sglang.needs`) and the tests of the part pass; no server was run on a GPU. They
were not on the cpu lane: there :mod:`sparkling_sglang.cpu` replaces names that moved since. 0.5.19
and 0.5.20 cannot refuse updates of the weights that would ruin an FP8 head, and do not know the
layout of Ling-3.0-flash-fp4.
"""

logger = logging.getLogger("sparkling_sglang")


def refusal(found: str, parts: Sequence[str] = tuple(KNOWN_SGLANG)) -> str | None:
    """The one line that says why SGLang ``found`` is not patched, or None when it is known.

    Args:
        found: its version.
        parts: what is switched on; one part that does not know the version is enough.
    """
    for part in parts:
        if found not in KNOWN_SGLANG[part]:
            known = ", ".join(KNOWN_SGLANG[part])
            return (
                f"sparkling-sglang {__version__}: found SGLang {found}, knows {known} for {part}; "
                "nothing patched."
            )
    return None


def role() -> str:
    """``main``, ``scheduler`` or ``other``: which of SGLang's processes this is.

    SGLang has not named the process yet when it loads plugins. A spawned scheduler has imported
    ``sglang.srt.managers.scheduler`` to find its entry function; the detokenizer has not.
    """
    if multiprocessing.parent_process() is None:
        return "main"
    return "scheduler" if "sglang.srt.managers.scheduler" in sys.modules else "other"


def _register_main(patches: Patches, wanted: Switches) -> None:
    """Where server arguments are resolved and checked."""
    if wanted.cpu_engine:
        from sparkling_sglang.cpu import arguments

        arguments.register(patches)
    if wanted.fp8_head:
        from sparkling_sglang import fp8_head

        fp8_head.register_main(patches)
    if wanted.trap:
        from sparkling_sglang import trap

        trap.register_main(patches, wanted)
    if wanted.keep_alive:
        from sparkling_sglang import keep_alive

        keep_alive.register_main(patches, wanted.keep_alive)


def _register_scheduler(patches: Patches, wanted: Switches) -> None:
    """Where the model runs."""
    from sparkling_sglang import share_head, status

    if wanted.cpu_engine:
        from sparkling_sglang.cpu import dequant, model, moe, sampling

        for part in (dequant, model, moe, sampling):
            part.register(patches)
    if wanted.fp8_head:
        from sparkling_sglang import fp8_head

        fp8_head.register(patches)
    if wanted.trap:
        from sparkling_sglang import trap

        trap.register(patches)
    if wanted.clamp and not wanted.cpu_engine:  # the CPU's experts above obey the limit already
        from sparkling_sglang import clamp

        clamp.register(patches)
    share_head.register(patches, hand_over=wanted.share_head)
    # Last, so that its hooks see what the others have done.
    status.start(patches, wanted)
    if wanted.status_file:
        from sparkling_sglang import kernel_cache

        kernel_cache.register(patches)
    if wanted.clamp or wanted.status_file:
        from sparkling_sglang import limits

        limits.register(patches, strict=wanted.clamp)


def register() -> None:
    """Patch this process as far as the environment asks for it. See the package docstring.

    Raises:
        SystemExit: a switch is neither on nor off, or a patch did not take. SGLang would log any
            other exception and serve on, with the wrong numbers.
    """
    try:
        wanted = switches.read()
    except ValueError as error:
        raise SystemExit(f"sparkling_sglang: error: {error}") from None
    if wanted.idle:
        return
    from sglang.version import __version__ as found

    here = role()
    reason = refusal(found, wanted.parts)
    if reason:
        if here == "main":  # once, not once per process
            logger.warning(reason)
        return
    patches = Patches()
    try:
        if here == "main":
            _register_main(patches, wanted)
        elif here == "scheduler":
            _register_scheduler(patches, wanted)
        patches.apply()
    except Exception as error:
        logger.exception("sparkling-sglang could not patch SGLang")
        raise SystemExit(f"sparkling-sglang: cannot patch SGLang {found}: {error}") from error
