"""Patches through SGLang's hook registry, recorded under short names and checked to have taken.

SGLang's registry logs a hook that fails to apply and goes on. On this lane a missing patch means
wrong numbers, so :meth:`Patches.apply` raises instead.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, Literal

Kind = Literal["before", "after", "around", "replace"]


class PatchError(RuntimeError):
    """A patch whose target does not exist or could not be changed."""


class Patches:
    """Collects the hooks of this plugin; ``names`` is what the status file shows as ``patched``."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._targets: list[str] = []

    def hook(self, name: str, target: str, fn: Callable[..., Any], kind: Kind = "replace") -> None:
        """Register ``fn`` on the dotted path ``target`` with SGLang's ``HookRegistry``.

        Args:
            name: short name for the status file, e.g. ``"kda"``; several hooks may share one.
            target: e.g. ``"sglang.srt.model_executor.model_runner.ModelRunner.load_model"``.
            fn: ``replace``: same signature as the target, or a class. ``before``: ``(*a, **k) ->
                (a, k) | None``. ``after``: ``(result, *a, **k) -> new | None``. ``around``:
                ``(original, *a, **k) -> result``.
        """
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(target, fn, HookType(kind))
        self._targets.append(target)
        self._record(name)

    def assign(self, name: str, target: str, value: Any) -> None:
        """Set the attribute at ``target`` now, whether or not it exists.

        Only for names that SGLang does not define on this platform at all: the hook registry wraps
        what is there and cannot add what is missing.

        Raises:
            PatchError: the module or class that should hold the attribute does not exist.
        """
        parent, _, attribute = target.rpartition(".")
        try:
            setattr(pkgutil.resolve_name(parent), attribute, value)
        except (ImportError, AttributeError, ValueError) as error:
            raise PatchError(f"cannot set {target}: {error}") from error
        self._record(name)

    def apply(self) -> None:
        """Apply the registered hooks and check each one.

        Raises:
            PatchError: SGLang's registry did not apply a hook (its own log line says why).
        """
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()
        missing = [t for t in self._targets if t not in HookRegistry._patched]
        if missing:
            raise PatchError("SGLang's hook registry did not patch " + ", ".join(missing))

    def _record(self, name: str) -> None:
        if name not in self.names:
            self.names.append(name)
