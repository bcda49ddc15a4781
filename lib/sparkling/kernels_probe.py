"""A short-lived server that compiles what a stage needs, with a few layers instead of all.

The kernels depend on shapes, dtypes and flags, not on how many layers there are or what their weights
hold. So the checkpoint's configuration with as few layers as show every kind of them, loaded with
dummy weights by the stage's own command, makes SGLang, FlashInfer, Humming and Triton compile exactly
what the stage needs, in a tenth of the memory. Started twice it shows what a cache is worth: first
start against warm start.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkling import architecture, inventory, kernels_humming
from sparkling.errors import SparklingError, UsageError
from sparkling.files import write_atomic

if TYPE_CHECKING:
    from sparkling.lane import Lane
    from sparkling.recipe import Launch

TOKENS = 16384
"""Context and KV cache of the probe: two chunks of prefill, as the recipes cut them."""
_LISTS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the fewest layers that hold every kind of them: both attentions, dense
    and expert layers, and a clamped expert layer where the model has any.

    Raises:
        UsageError: not a configuration of Ling-3.0.
    """
    shape = architecture.shape(config)
    group = config.get("layer_group_size", 1)
    if isinstance(group, int):
        layers = max(group, -(-(shape.moe_from + 1) // group) * group)
    else:
        first = {linear: i for i, linear in reversed(list(enumerate(group[: shape.layers])))}
        layers = max(shape.moe_from + 1, *(i + 1 for i in first.values()))
    layers = min(layers, shape.layers)
    small = {**config, "num_hidden_layers": layers}
    if not isinstance(group, int):
        small["layer_group_size"] = list(group[:layers])
    for name in _LISTS:
        if isinstance(config.get(name), list):
            # The last ones, for only there do Ling's experts have a limit.
            small[name] = list(config[name][-layers:])
    return small


def model(where: Path, folder: Path) -> Path:
    """Write the probe's checkpoint folder: a configuration, no weights. `where`: the checkpoint, or
    nothing yet, when the full-size model's known sizes are taken."""
    source = where / "config.json"
    config = json.loads(source.read_text()) if source.is_file() else inventory.flash_config()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.json", json.dumps(shrink(config), indent=1) + "\n")
    return folder


def launch(of: Launch, folder: Path) -> Launch:
    """The stage's own command, for the probe's model."""
    argv, skip = [], False
    words = list(of.argv)
    tokens = str(min(TOKENS, int(of.value("context-length") or TOKENS)))
    changed = {
        "--model-path": str(folder),
        "--speculative-draft-model-path": str(folder),
        "--context-length": tokens,
        "--max-total-tokens": tokens,
    }
    # They need a tokenizer, which the probe does without.
    dropped = ("--reasoning-parser", "--tool-call-parser")
    for at, word in enumerate(words):
        if skip:
            skip = False
        elif word in changed:
            argv += [word, changed[word]]
            skip = True
        elif word in dropped:
            skip = at + 1 < len(words) and not words[at + 1].startswith("--")
        else:
            argv.append(word)
    if "--max-total-tokens" not in argv:
        argv += ["--max-total-tokens", tokens]
    argv += ["--load-format", "dummy", "--skip-tokenizer-init"]
    return dataclasses.replace(of, argv=tuple(argv), recipe=f"{of.recipe} (probe)")


@dataclass(frozen=True)
class Warm:
    """Seconds until ready: the first start, which compiled what was missing, and the next one.

    compiled: how many of Humming's kernels each of the two starts added to its cache; None for a
    stage without Humming. A first start that added none found a cache, and shows nothing of it.
    """

    stage: str
    first_s: float
    again_s: float
    compiled: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "saved_s": self.first_s - self.again_s}

    def __str__(self) -> str:
        text = (
            f"{self.stage}: ready after {self.first_s:.1f} s at the first start and "
            f"{self.again_s:.1f} s at the next (n=1 each, a few layers with dummy weights)"
        )
        if self.compiled is None:
            return text
        if not any(self.compiled):
            return f"{text}; Humming's kernels were in its cache already"
        return (
            f"{text}; {self.compiled[0]} of Humming's kernels were compiled at the first and "
            f"{self.compiled[1]} at the next"
        )


def warm(
    of: Launch,
    lane: Lane,
    folder: Path,
    *,
    deadline_s: float = 1800,
    progress: Callable[[str, float], None] | None = None,
) -> Warm:
    """Start the probe twice and stop it again; everything the stage compiles is in its caches then.

    Raises:
        SparklingError: as `server.start`.
    """
    from sparkling import server

    small = launch(of, model(lane.model, folder / "model"))
    took, cached = [], []
    cache = None
    if of.value("moe-runner-backend") == "humming":
        env = server.child_environment(small.env, lane.server_python)
        cache = kernels_humming.cache_folder(env)

    def count() -> None:
        if cache is not None:
            found = kernels_humming.inventory(cache)
            cached.append({entry.folder.name for entry in found if entry.current})

    count()
    for number in ("first", "again"):
        with server.start(
            small,
            python=lane.server_python,
            log=folder / f"{of.stage}-{number}.log",
            deadline_s=deadline_s,
            progress=progress,
            runs=lane.runs,
        ) as running:
            took.append(float(running.ready_seconds or 0.0))
        count()
    added = tuple(len(after - before) for before, after in itertools.pairwise(cached))
    return Warm(of.stage, *took, compiled=added or None)


def forget_rules(roots: Sequence[Path], name: str) -> None:
    """Remove FlashInfer's build rules of `name`, not what was built by them."""
    for root in roots:
        for path in root.glob(f"**/{name}/build.ninja"):
            path.unlink(missing_ok=True)


def wait_for_rules(
    roots: Sequence[Path],
    name: str,
    alive: Callable[[], bool],
    *,
    limit_s: float = 1800,
    poll_s: float = 1.0,
    still: int = 3,
) -> Path:
    """Wait until a server has written FlashInfer's build rules, whole: for a FlashInfer without the
    generator. The file counts once its size has not changed for `still` looks.

    Raises:
        SparklingError: the server ended, or the time did, before there were any.
    """
    began, seen = time.time(), {}
    deadline = time.monotonic() + limit_s
    while alive() and time.monotonic() < deadline:
        for root in roots:
            for path in root.glob(f"**/{name}/build.ninja"):
                info = path.stat()
                if info.st_mtime < began - 1:
                    continue
                size, looks = seen.get(path, (-1, 0))
                seen[path] = (info.st_size, looks + 1 if size == info.st_size else 0)
                if seen[path][1] >= still:
                    return path
        time.sleep(poll_s)
    raise SparklingError(
        f"The probe server wrote no build rules of {name}; its log says how far it came."
    )


def needs_gpu(of: Launch) -> None:
    """Raise UsageError for a launch that compiles nothing."""
    if of.value("device") == "cpu":
        raise UsageError(
            "The cpu lane compiles no kernels; this is for a GPU (`sparkling kernels plan` says what "
            "applies)."
        )
