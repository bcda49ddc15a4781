"""The user's own prompts: one JSON object a line, as a workload.

    {"prompt": "one user message"}
    {"id": "refund-3", "messages": [{"role": "system", "content": "…"}, {"role": "user", …}]}

`id` is optional (the line's number stands in) and names the prompt in every row. Further keys are
refused rather than ignored. Empty lines are skipped. Lines end at a line feed only: a prompt may hold
any other separator that Unicode knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkling.errors import UsageError
from sparkling.files import os_error
from sparkling.workloads import Prompt, Workload

ROLES = ("system", "user", "assistant", "tool")
NAMED = 3  # bad lines named in the sentence; the others are counted


def load(path: Path, *, max_tokens: int, thinking: bool | None = None) -> Workload:
    """The file as the workload `prompts`, greedy, answers of at most `max_tokens` tokens.

    Raises UsageError for a file that cannot be read or holds no prompt, and for bad lines, each
    named with its number and what is wrong with it.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(str(os_error(error, "reading", path))) from error
    prompts: list[Prompt] = []
    bad: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        made = _prompt(line, number)
        if isinstance(made, str):
            bad.append(f"line {number} {made}")
        elif made.id in seen:
            bad.append(f"line {number} has the id {made.id!r} of line {seen[made.id]}")
        else:
            seen[made.id] = number
            prompts.append(made)
    if bad:
        more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
        raise UsageError(f"{path}: {'; '.join(bad[:NAMED])}{more}.")
    if not prompts:
        raise UsageError(f"{path} holds no prompt.")
    n = len(prompts)
    return Workload(
        "prompts",
        f"{n} prompt{'' if n == 1 else 's'} of {path.name}, answers of at most {max_tokens} tokens",
        tuple(prompts),
        max_tokens,
        thinking=thinking,
    )


def _prompt(line: bytes, number: int) -> Prompt | str:
    """The prompt, or what is wrong with the line."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    if not isinstance(data, dict):
        return "is not a JSON object"
    unknown = [k for k in data if k not in ("id", "prompt", "messages")]
    if unknown:
        return f"has the unknown key {unknown[0]!r} (id, prompt and messages are known)"
    name = data.get("id", number)
    if isinstance(name, bool) or not isinstance(name, (str, int)) or not str(name).strip():
        return f"has {name!r} for an id, which is neither text nor a whole number"
    if ("prompt" in data) == ("messages" in data):
        return "must have either prompt or messages"
    if "prompt" in data:
        text = data["prompt"]
        if not isinstance(text, str) or not text.strip():
            return "has an empty prompt, or one that is not text"
        return Prompt(str(name), text)
    messages = data["messages"]
    if not isinstance(messages, list) or not messages:
        return "has no messages"
    for i, message in enumerate(messages, 1):
        wrong = _wrong(message)
        if wrong:
            return f"message {i} {wrong}"
    return Prompt(str(name), "", messages=tuple(messages))


def _wrong(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return "is not an object"
    if message.get("role") not in ROLES:
        return f"has the role {message.get('role')!r} ({', '.join(ROLES)} are known)"
    content = message.get("content")
    if not isinstance(content, (str, list)) and not message.get("tool_calls"):
        return "has no content"
    return None
