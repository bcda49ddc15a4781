"""Keep secrets out of everything that is written down."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"

# Names of settings that hold a secret. "token" counts only as the last word and in the singular:
# `HF_TOKEN` is a secret, `max_tokens` and `tokenizer_path` are not; nor are the tokens of a
# tokenizer (`eos_token`).
_NAME = re.compile(
    r"(?i)(^|[_-])(api[_-]?key|apikey|secret|password|passwd|passphrase|credentials?|authorization"
    r"|cookie|private[_-]?key|access[_-]?key)([_-]|$)|(^|[_-])token$"
)
_NOT_SECRET = re.compile(
    r"(?i)^(eos|bos|pad|unk|sep|cls|mask|stop|start|end|think|tool|draft|max|image|audio|video)[_-].*token$"
)
# Secrets that show by their shape wherever they stand.
_SHAPE = re.compile(
    r"(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{12,}"
    r"|\b(?:hf_|gh[opsu]_)[A-Za-z0-9]{30,}\b|\bsk-[A-Za-z0-9_-]{20,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_OPTION = re.compile(
    r"(?i)(--?[a-z0-9-]*(?:api-key|token|password|secret)(?:=|\s+(?!-)))"
    r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"]+)"
)
_SHORTEST = 4  # a shorter "secret" would blank out ordinary text


def is_secret_name(name: str) -> bool:
    """Whether a setting called `name` holds a secret."""
    bare = name.lstrip("-")
    return bool(_NAME.search(bare)) and not _NOT_SECRET.match(bare)


def environment_secrets(env: Mapping[str, str] = os.environ) -> list[str]:
    """Values in the environment that are secrets by their name (HF_TOKEN and the like). Shorter
    ones than any real key ("true", "none") are not."""
    return [v for k, v in env.items() if is_secret_name(k) and len(v) >= 8]


def mask_text(text: str, secrets: Iterable[str | None] = ()) -> str:
    """`text` without the given secrets, without options that carry one, and without what looks
    like one."""
    for secret in sorted({s for s in secrets if s and len(s) >= _SHORTEST}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _OPTION.sub(lambda m: m.group(1) + MASK, text)
    return _SHAPE.sub(MASK, text)


def redact(value: Any, secrets: Iterable[str | None] = ()) -> Any:
    """A copy of a JSON-like value with secrets masked: values of secret names (in mappings, and
    after `--api-key` in argument lists), the given strings, and what looks like a key."""
    secrets = [s for s in secrets if s]
    if isinstance(value, Mapping):
        return {
            k: MASK
            if isinstance(k, str) and is_secret_name(k) and _is_set(v)
            else redact(v, secrets)
            for k, v in value.items()
        }
    if isinstance(value, str):
        return mask_text(value, secrets)
    if isinstance(value, (list, tuple)):
        out: list[Any] = []
        hide = False
        for item in value:
            if hide and isinstance(item, str) and not item.startswith("-"):
                out.append(MASK)
                hide = False
                continue
            out.append(redact(item, secrets))
            hide = (
                isinstance(item, str)
                and item.startswith("-")
                and "=" not in item
                and is_secret_name(item)
            )
        return out
    return value


def _is_set(value: Any) -> bool:
    """Only text (or lists of it) can be a secret; None, False and numbers say something useful."""
    return isinstance(value, (str, list, tuple, dict)) and bool(value)
