"""GSM8K from Hugging Face or ModelScope, by their own clients, kept only if its SHA-256 is right.

The checksum is that of the JSONL file in openai/grade-school-math. Hubs that hold the same rows as
Parquet are read too: written as that file writes them, the rows give the same bytes, so the same
checksum proves them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from sparkling import gsm8k, hubs, parquet
from sparkling.errors import SparklingError, UsageError
from sparkling.files import write_atomic

HUBS = ("huggingface", "modelscope")
REPOS = {
    "huggingface": ("openai/gsm8k",),
    "modelscope": ("AI-ModelScope/gsm8k", "modelscope/gsm8k"),
}
FILES = ("{split}.jsonl", "main/{split}-00000-of-00001.parquet")
BY_HAND = (
    "fetch grade_school_math/data/{split}.jsonl of https://github.com/openai/grade-school-math by "
    "hand and put it into {folder} (or name its folder in " + gsm8k.VARIABLE + ")"
)


def ensure(split: str, root: Path, *, say: Callable[[str], None] | None = None) -> Path:
    """The file where it is, else from the first hub that has it. Raises what `fetch` raises."""
    return gsm8k.find(split, root) or fetch(split, root, say=say)


def fetch(
    split: str, root: Path, *, hub: str = "auto", say: Callable[[str], None] | None = None
) -> Path:
    """Fetch the "test" or "train" file into `gsm8k.folder`, and return its path.

    hub: "huggingface", "modelscope", or "auto" for both in turn. Raises SparklingError with each
    hub's reason when none has the right content, UsageError for an unknown hub.
    """
    if hub not in ("auto", *HUBS):
        raise UsageError(f"There is no hub {hub!r}; there are auto, {', '.join(HUBS)}.")
    target = gsm8k.folder(root) / f"{split}.jsonl"
    staging = target.parent / f".{split}.fetching"
    reasons = []
    try:
        for one in HUBS if hub == "auto" else (hub,):
            for repo in REPOS[one]:
                for pattern in FILES:
                    name = pattern.format(split=split)
                    if say:
                        say(f"Asking {hubs.TITLES[one]} for {repo}/{name}")
                    try:
                        data = _content(_download(one, repo, name, staging))
                    except SparklingError as error:
                        reasons.append(f"{repo}/{name} on {hubs.TITLES[one]}: {error}")
                        continue
                    found = hashlib.sha256(data).hexdigest()
                    if found == gsm8k.SHA256[split]:
                        write_atomic(target, data)
                        return target
                    reasons.append(
                        f"{repo}/{name} on {hubs.TITLES[one]}: other content (SHA-256 {found[:12]}…)"
                    )
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    by_hand = BY_HAND.format(split=split, folder=target.parent)
    raise SparklingError(
        f"GSM8K's {split} file could not be fetched ({'; '.join(reasons)}); {by_hand}."
    )


def _download(hub: str, repo: str, name: str, staging: Path) -> Path:
    """One file by the hub's own client. SparklingError with a clause when it cannot be had."""
    staging.mkdir(parents=True, exist_ok=True)
    where = hubs.endpoint(hub)
    try:
        with hubs.direct_to_loopback(where):
            if hub == "huggingface":
                from huggingface_hub import hf_hub_download

                return Path(
                    hf_hub_download(
                        repo, name, repo_type="dataset", local_dir=staging, endpoint=where
                    )
                )
            from modelscope.hub.file_download import dataset_file_download

            return Path(dataset_file_download(repo, name, local_dir=str(staging), endpoint=where))
    except Exception as error:  # the hubs' clients raise whatever their own libraries raise
        said = " ".join(str(error).split())[:120] or "no reason given"
        raise SparklingError(f"{type(error).__name__}: {said}") from None


def _content(path: Path) -> bytes:
    """The file's bytes, a Parquet file's rows written as the original JSONL."""
    if path.suffix != ".parquet":
        return path.read_bytes()
    columns = parquet.strings(path.read_bytes(), ("question", "answer"))
    return b"".join(
        (json.dumps({"question": q, "answer": a}) + "\n").encode()
        for q, a in zip(columns["question"], columns["answer"], strict=True)
    )
