"""The environment variables that this plugin obeys, read in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

FP8_HEAD = "SPARKLING_FP8_LM_HEAD"
FORK_FP8_HEAD = "SGLANG_ENABLE_FP8_LM_HEAD"  # the Spark fork's name; SGLang 0.5.23 ignores it
SHARE_HEAD = "SPARKLING_SHARE_HEAD"
TRAP = "SPARKLING_TRAP"
TENSOR_ONLY = "tensor-only"
KEEP_ALIVE = "SPARKLING_KEEP_ALIVE_S"
CLAMP = "SPARKLING_SWIGLU_CLAMP"
STATUS_FILE = "SPARKLING_STATUS_FILE"
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"


ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _on(env: Mapping[str, str], name: str, default: bool = False) -> bool:
    """True for 1/true/yes/on, False for 0/false/no/off, in any case; ``default`` when the variable
    is unset or empty.

    Raises:
        ValueError: another word in a variable of ours; it must not pass for "off" without a word.
    """
    value = env.get(name, "").strip().lower()
    if not value:
        return default
    if value not in ON + OFF and name != CPU_ENGINE:  # that one is SGLang's, which judges it
        raise ValueError(f"{name} is {env[name]!r}: set it to 1 or 0, or leave it unset.")
    return value in ON


@dataclass(frozen=True)
class Switches:
    """What the environment asks for.

    ``share_head`` hands the target's whole LM-head module to the NEXTN draft. It follows
    ``fp8_head`` unless ``SPARKLING_SHARE_HEAD`` says otherwise: with 0 the draft is left with what
    SGLang gives it. ``trap`` is the teaching switch's value (see :mod:`sparkling_sglang.trap`);
    ``clamp`` makes Humming and Marlin obey Ling's SwiGLU limit (:mod:`sparkling_sglang.clamp`).
    """

    cpu_engine: bool
    fp8_head: bool
    share_head: bool
    status_file: str | None
    trap: str | None = None
    keep_alive: str | None = None
    clamp: bool = False

    @property
    def idle(self) -> bool:
        """True when there is nothing for this plugin to do."""
        asked = self.fp8_head or self.share_head or self.trap or self.status_file or self.clamp
        return not (self.cpu_engine or asked or self.keep_alive)

    @property
    def parts(self) -> tuple[str, ...]:
        """What of this plugin is switched on, by the names in which versions are known."""
        on = {
            "cpu-engine": self.cpu_engine,
            "fp8-head": self.fp8_head,
            "share-head": self.share_head,
            "trap": self.trap,
            "clamp": self.clamp,
            "keep-alive": self.keep_alive,
            "status": self.status_file,
        }
        return tuple(name for name, value in on.items() if value)

    def ids(self) -> dict[str, bool]:
        """Switch ids as the status file names them; the clamp and a trap only where they are set."""
        ids = {"fp8-head": self.fp8_head, "share-head": self.share_head}
        ids |= {"swiglu-clamp": True} if self.clamp else {}
        return ids | ({"trap": True} if self.trap else {})


def read(env: Mapping[str, str] | None = None) -> Switches:
    """Read the switches from ``env`` (default: ``os.environ``).

    Raises:
        ValueError: a switch is neither on nor off; the message is one sentence.
    """
    env = os.environ if env is None else env
    fp8_head = _on(env, FP8_HEAD) or _on(env, FORK_FP8_HEAD)
    trap = env.get(TRAP, "").strip() or None
    return Switches(
        cpu_engine=_on(env, CPU_ENGINE),
        fp8_head=fp8_head,
        share_head=_on(env, SHARE_HEAD, default=fp8_head and not trap),
        status_file=env.get(STATUS_FILE) or None,
        trap=trap,
        keep_alive=env.get(KEEP_ALIVE, "").strip() or None,
        clamp=_on(env, CLAMP),
    )
