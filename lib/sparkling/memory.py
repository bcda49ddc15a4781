"""Does a stage fit this machine? The sum, before anything is started.

    memory.need(recipe, "nextn", model=...)    the parts, their sum, and what is wrong with it
    memory.need_of(launch)                     the same of a rendered launch; `server.start` asks it

The formulas are SGLang 0.5.23's (`mem_cache/kv_cache_configurator.py`, `memory_pool.py`), and they
reproduce what it logged on an H200 for the full-size model with dummy weights (tests/data/logs):

- KV cache: layers × (kv_lora_rank + qk_rope_head_dim) × bytes a token; 7 MLA layers, and one more
  for the NEXTN draft: 8,064 and 1,152 bytes.
- KDA states: (slots + 1) × KDA layers × (heads × head_dim² × 4 + (conv − 1) × 3 × heads × head_dim
  × 2) bytes; speculation keeps (requests + 1) × draft tokens of them besides.
- `--mem-fraction-static` f: of what is available before loading, 1 − f stays free; weights and
  states come off the rest, and what remains becomes the KV cache, whatever the context needs.

Bytes throughout. Nothing here was measured on a Spark by us.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkling import inventory, machine, memwatch
from sparkling.cgroup import Read, memory_limits, read_text
from sparkling.errors import SparklingError, UsageError
from sparkling.machine import Memory

if TYPE_CHECKING:
    from sparkling.recipe import Launch, Recipe

GIB = 2**30

SAFE_FRACTION = 0.68
"""The highest --mem-fraction-static that a Spark is started with unasked: the published
measurements' (`ly01325/Ling3-Flash-DGX-Spark`)."""

I_KNOW = "SPARKLING_I_KNOW_THIS_CAN_LOCK_THE_MACHINE"
RISK = (
    "at 0.75 one publisher ran out of memory and lost the driver until the power button was pressed "
    "(ly01325/Ling3-Flash-DGX-Spark); another ran 0.75 and 0.85 and was none the faster for it "
    "(0xBakeer/ling3-flash-spark)"
)

LOADED = 1.02
"""Weights in memory over weights on the disk: 65.13 of 64.04 GiB, logged by SGLang 0.5.23 on an H200
with dummy weights and Humming (1.017)."""
DRAFT_LOADED = 1.11
"""The same for the NEXTN layer with its own embeddings and head: 3.38 of 3.05 GiB (1.108)."""
GRAPHS = 0.8 * GIB
"""CUDA graphs at batch 1: 0.79 GB, published for a Spark (`ling-cookbook`); 0.06 to 0.25 on an H200."""
RESERVE = {"unified": 8 * GIB, "gpu": 4 * GIB, "cpu": GIB // 2}
"""Kept for everything else. unified: ours; with it the sum of the last stage comes to the 85 GiB
that `0xBakeer/ling3-flash-spark` asks for before a start. gpu: activations and the CUDA context.
cpu: the notebook."""
PROCESSES = 3 * GIB
"""SGLang's own processes on the cpu lane. A ready server with the tiny Ling held 1.29 GiB of its own
(n=1, anonymous and shared memory of its process tree, x86-64); while it loads it takes more, and
`needs.py` knows of 4 GiB at most, files mapped included."""

# The watchdog's limit: 5 % of the memory, which is 6 GiB on a Spark. Cache that the kernel would drop
# is not counted as used, so a machine that works well is never near it.
FLOOR_SHARE, FLOOR_LEAST, FLOOR_MOST = 0.05, GIB // 4, 6 * GIB
FLOOR = "SPARKLING_MEMORY_FLOOR_GIB"


class NoMemory(SparklingError):
    """A server that is not started because memory would not last."""


@dataclass(frozen=True)
class Part:
    """One line of the sum; `why` says where the number comes from."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True, repr=False)
class Need:
    """What one launch needs of the memory that its model is loaded into, and what is there.

    kv_tokens: what SGLang's own rule will make of the KV cache, None where it cannot be known.
    least: what must be available for a start; more than the peak where that rule would otherwise
        leave the KV cache too small for the context.
    loading: the most that is taken while weights are loaded, where that is a matter of its own.
    """

    recipe: str
    stage: str
    kind: str  # "unified" | "gpu" | "cpu"
    parts: tuple[Part, ...]
    available: int
    total_memory: int
    source: str
    context: int
    fraction: float | None
    kv_tokens: int | None
    least: int
    loading: Part | None = None
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = field(default=())

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def peak(self) -> int:
        """The most that is taken at any time: serving, or loading."""
        return max(self.total, self.loading.bytes if self.loading else 0)

    @property
    def ok(self) -> bool:
        return not self.problems

    def line(self) -> str:
        """The sum in one line: "needs 84.9 of 115.0 GiB available (weights 65.3, …)"."""
        sizes = [(part.name, part.bytes / GIB) for part in self.parts]
        listed = ", ".join(f"{n} {f'{x:.1f}' if x >= 0.05 else '< 0.1'}" for n, x in sizes)
        here = f"{self.peak / GIB:.1f} of {self.available / GIB:.1f} GiB available"
        return f"needs {here} ({listed})"

    def require(self) -> None:
        """Raise NoMemory with the first problem and the sum in one sentence."""
        if self.problems:
            raise NoMemory(f"{self.stage} is not started: {self.problems[0]}.")

    def to_json(self) -> dict[str, Any]:
        parts = [vars(part) for part in self.parts]
        loading = vars(self.loading) if self.loading else None
        return {
            **vars(self),
            "parts": parts,
            "loading": loading,
            "total": self.total,
            "peak": self.peak,
            "ok": self.ok,
            "problems": list(self.problems),
            "remarks": list(self.remarks),
        }

    def view(self) -> Any:
        """The sum as a table (`show.View`)."""
        from sparkling import show

        rows = [(part.name, part.bytes / GIB, part.why) for part in self.parts]
        rows.append(("sum", self.total / GIB, "while it serves"))
        if self.loading is not None:
            rows.append((self.loading.name, self.loading.bytes / GIB, self.loading.why))
        rows.append(("available now", self.available / GIB, self.source))
        lines = [*self.problems, *self.remarks]
        verdict = "fits" if self.ok else "does not fit"
        title = f"Memory of {self.recipe}, stage {self.stage}: {verdict}"
        caption = " ".join(f"{line[0].upper()}{line[1:]}." for line in lines)
        return show.table(rows, ["", "GiB", "from"], title=title, caption=caption)

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()

    def __str__(self) -> str:
        return str(self.view())

    __repr__ = __str__


# -- the sum -------------------------------------------------------------------------------------


def need(
    recipe: Recipe,
    stage: str,
    *,
    model: Path | str | None = None,
    variant: str | None = None,
    memory: Memory | Callable[[], Memory] | None = None,
    consent: bool = False,
) -> Need:
    """What a stage of a recipe needs here.

    Args:
        model: the checkpoint; the recipe's own when not given. The full-size model's sizes are known
            without it.
        memory: what is there; by default this machine's, looked at now.
        consent: see `need_of`.

    Raises:
        UsageError: no such stage, or a checkpoint whose sizes cannot be known.
    """
    launch = recipe.render(stage, model=model or recipe.model, variant=variant, port=0)
    found = need_of(launch, memory=memory, consent=consent)
    if found is None:
        raise UsageError(
            f"The memory of stage {stage} cannot be reckoned: the sizes of {launch.model} are "
            "unknown; give a checkpoint of Ling-3.0."
        )
    return found


def need_of(
    launch: Launch,
    *,
    memory: Memory | Callable[[], Memory] | None = None,
    consent: bool = False,
) -> Need | None:
    """What a rendered launch needs here; None where its model's sizes are unknown (a hub's name).

    consent: a fraction above SAFE_FRACTION on a machine with one memory pool is allowed; the
    environment variable I_KNOW=1 says so too.
    """
    book = sizes(launch)
    if book is None:
        return None
    on_cpu = launch.value("device") == "cpu"
    if memory is None:
        memory = machine.host_memory if on_cpu else machine.memory
    here = memory if isinstance(memory, Memory) else memory()
    own = here.gpu_total is not None or here.untold
    kind = "cpu" if on_cpu else "gpu" if own else "unified"
    available = here.available if on_cpu else here.model_available
    if kind == "gpu" and here.gpu_available is None:
        available = here.gpu_total or 0  # in use by nobody, for all that is told
    total = here.total if on_cpu else here.model_total
    sums = _Sums(launch, book, kind, available)
    asked = consent or os.environ.get(I_KNOW, "").strip() == "1"
    problems, remarks = sums.problems(asked), sums.remarks(asked)
    if kind == "gpu" and here.untold:
        problems = [
            f"how much memory {here.gpu} has is not known, for nvidia-smi does not answer; have it "
            "answer first (a driver that hangs needs a reboot)"
        ]
    elif kind == "gpu" and here.gpu_available is None:
        remarks.append(f"what is in use of {here.gpu}'s memory is not told, and taken as nothing")
    return Need(
        recipe=launch.recipe,
        stage=launch.stage,
        kind=kind,
        parts=tuple(sums.parts()),
        available=available,
        total_memory=total,
        source=here.source if kind != "gpu" else f"the GPU's own memory ({here.gpu})",
        context=sums.context,
        fraction=sums.fraction,
        kv_tokens=sums.kv_tokens(),
        least=sums.least(),
        loading=sums.loading(),
        problems=tuple(problems),
        remarks=tuple(remarks),
    )


def sizes(launch: Launch) -> inventory.Inventory | None:
    """The tensors of a launch's model: its checkpoint's, or those known of the full-size model. None
    where they cannot be known."""
    try:
        if launch.model and Path(launch.model, "config.json").is_file():
            found = inventory.inventory(Path(launch.model))
        elif launch.recipe == inventory.FLASH:
            found = inventory.inventory(inventory.FLASH)
        else:
            return None
    except UsageError:
        return None
    return None if found.shape is None else found


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


class _Sums:
    """The arithmetic of one launch."""

    def __init__(
        self, launch: Launch, book: inventory.Inventory, kind: str, available: int
    ) -> None:
        self.kind, self.available, self.launch = kind, available, launch
        self.shape, self.book = book.known(), book
        gpus = self._whole("tp-size", 1) * self._whole("pp-size", 1)
        self.gpus = max(1, gpus)
        told = launch.value("mem-fraction-static")
        self.fraction = float(told) if told else None
        self.context = self._whole("context-length", 0)
        self.running = self._whole("max-running-requests", 1)
        self.slots = self._whole("max-mamba-cache-size", 0)
        self.fixed_tokens = self._whole("max-total-tokens", 0)
        self.drafts = launch.value("speculative-algorithm") in ("NEXTN", "EAGLE")
        width = 1 if "fp8" in (launch.value("kv-cache-dtype") or "") else 2
        layer = (self.shape.kv_lora + self.shape.rope) * width
        self.per_token = layer * (len(self.shape.mla) + (1 if self.drafts else 0))
        s = self.shape
        self.state = s.kda_layers * (
            s.heads * s.head_dim**2 * 4 + (s.conv - 1) * 3 * s.kda_width * 2
        )

    def _whole(self, flag: str, default: int) -> int:
        value = self.launch.value(flag)
        return int(value) if value and value.isdigit() else default

    # The parts, each for one GPU (weights are shared out among several).

    @property
    def weights(self) -> int:
        disk = self.book.bytes_total - self._nextn()
        return int(disk * (LOADED if self.kind != "cpu" else 1)) // self.gpus

    def _nextn(self) -> int:
        return sum(part.bytes for part in self.book.components if part.name.startswith("NEXTN"))

    @property
    def draft(self) -> int:
        if not self.drafts:
            return 0
        sizes = self.book.sizes
        own = self._nextn() + sizes.get("embeddings", 0) + sizes.get("LM head", 0)
        return int(own * (DRAFT_LOADED if self.kind != "cpu" else 1)) // self.gpus

    @property
    def states(self) -> int:
        # Where the recipe leaves the number to SGLang, at least what one running request takes.
        return (max(self.slots, 5 * self.running) + 1) * self.state // self.gpus

    @property
    def drafted_states(self) -> int:
        tokens = self._whole("speculative-num-draft-tokens", 4) if self.drafts else 0
        return (self.running + 1) * tokens * self.state // self.gpus

    @property
    def graphs(self) -> int:
        return 0 if self.kind == "cpu" else int(GRAPHS)

    @property
    def kv(self) -> int:
        tokens = self.fixed_tokens or self.context
        return tokens * self.per_token

    def parts(self) -> list[Part]:
        kv = f"{self.fixed_tokens or self.context:,} tokens of {self.per_token:,} bytes"
        found = [
            Part("weights", self.weights, self.book.source),
            Part("KV cache", self.kv, kv if self.fixed_tokens else f"the promised context: {kv}"),
            Part("KDA states", self.states, f"{self.slots or 'SGLang chooses the'} slots"),
        ]
        if self.drafts:
            found.append(Part("draft", self.draft, "the NEXTN layer, loaded with its own head"))
            found.append(
                Part("states of drafts", self.drafted_states, "one for each drafted token")
            )
        if self.kind != "cpu":
            found.append(Part("graphs", self.graphs, "published for a Spark at batch 1"))
        else:
            found.append(
                Part(
                    "processes",
                    int(PROCESSES),
                    "SGLang and torch: 1.3 GiB once ready, more while loading",
                )
            )
        found.append(Part("reserve", int(RESERVE[self.kind]), "everything else"))
        return found

    def loading(self) -> Part | None:
        """Humming's scales are loaded in FP32 and become one byte each only when all are there."""
        if self.kind == "cpu" or self.launch.value("moe-runner-backend") != "humming":
            return None
        scales = sum(
            part.bytes
            for part in self.book.components
            if part.name == "routed experts" and part.dtype == "F8_E8M0"
        )
        if not scales:
            return None
        size = self.weights + 3 * scales // self.gpus + int(RESERVE[self.kind])
        why = "weights, three more bytes for each scale (as read in SGLang's code), reserve"
        return Part("while loading", size, why)

    @property
    def ruled(self) -> bool:
        """Whether SGLang's rule makes the KV cache, and everything in it is known."""
        known = self.fraction is not None and bool(self.slots)
        return known and not self.fixed_tokens and self.kind != "cpu"

    @property
    def held(self) -> int:
        """What comes out of the static share before the KV cache."""
        return self.weights + self.draft + self.states + self.drafted_states

    def kv_tokens(self) -> int | None:
        """Tokens of the KV cache that SGLang's rule leads to."""
        if self.fixed_tokens:
            return self.fixed_tokens
        if not self.ruled:
            return None
        return max(0, int((self.available * self.fraction - self.held) / self.per_token))

    def peak(self) -> int:
        """The most that is taken, serving or loading."""
        loading = self.loading()
        total = sum(part.bytes for part in self.parts())
        return max(total, loading.bytes if loading else 0)

    def least(self) -> int:
        """What must be available: for the peak, and for a KV cache of the whole context."""
        if not self.ruled:
            return self.peak()
        share = math.ceil((self.held + self.context * self.per_token) / self.fraction)
        return max(self.peak(), share)

    # The verdicts.

    def problems(self, consent: bool) -> list[str]:
        found = []
        total, peak = sum(part.bytes for part in self.parts()), self.peak()
        if peak > self.available:
            listed = ", ".join(f"{part.name} {_gib(part.bytes)}" for part in self.parts())
            when = " while its weights are loaded" if peak > total else ""
            found.append(
                f"it needs {_gib(peak)}{when} ({listed}) and {_gib(self.available)} are available; "
                "stop what else uses memory (`sparkling stop` ends servers of ours)"
            )
        tokens = self.kv_tokens()
        if tokens is not None and tokens < self.context:
            levers = "raise --max-total-tokens"
            if not self.fixed_tokens:
                # The fraction is taken of what is available at the start, so freeing some helps.
                enough = math.ceil(self.least() / GIB * 10) / 10
                levers = f"free memory before the start, until {enough:.1f} GiB are available"
                if self.kind != "unified" or (self.fraction or 0) < SAFE_FRACTION:
                    levers = f"raise --mem-fraction-static, {levers}"
            found.append(
                f"its KV cache would hold {tokens:,} tokens and the context promises "
                f"{self.context:,}; {levers}, or lower --context-length"
            )
        if self.kind == "unified" and not consent:
            if self.fraction is None:
                found.append(
                    "it leaves --mem-fraction-static to SGLang, which keeps less free than is safe "
                    f"with one memory pool: {RISK}; set it to {SAFE_FRACTION} in the recipe, or "
                    f"accept the risk with {I_KNOW}=1"
                )
            elif self.fraction > SAFE_FRACTION:
                found.append(
                    f"--mem-fraction-static {self.fraction:g} is above {SAFE_FRACTION}: {RISK}; lower "
                    f"it, or accept the risk with {I_KNOW}=1"
                )
        return found

    def remarks(self, consent: bool) -> list[str]:
        found = []
        tokens = self.kv_tokens()
        if tokens is not None and not self.fixed_tokens:
            found.append(
                f"SGLang will make room for {tokens:,} tokens at --mem-fraction-static "
                f"{self.fraction:g}, for a context of {self.context:,}"
            )
        if self.kind == "unified" and consent and (self.fraction or 1) > SAFE_FRACTION:
            found.append(f"the risk was accepted: {RISK}")
        return found


# -- the watchdog's limits -----------------------------------------------------------------------


def floor(total: int, env: Mapping[str, str] = os.environ) -> int:
    """Bytes below which the watchdog ends a server, of `total` bytes of memory; FLOOR sets it.

    Raises:
        UsageError: FLOOR is no number of GiB.
    """
    told = env.get(FLOOR, "").strip()
    if not told:
        return int(min(max(FLOOR_SHARE * total, FLOOR_LEAST), FLOOR_MOST))
    value = -1.0
    with contextlib.suppress(ValueError):
        value = float(told)
    if not 0 <= value < total / GIB:
        raise UsageError(
            f"{FLOOR}={told} must be a number of GiB from 0 to less than this machine's "
            f"{total / GIB:.0f}; unset it for 5 % of the memory."
        )
    return int(value * GIB)


def watch_limits(
    *,
    gpu: bool = False,
    read: Read = read_text,
    env: Mapping[str, str] = os.environ,
) -> memwatch.Limits | None:
    """Where the watchdog warns and ends a server here; None where /proc tells nothing.

    The environment variable FLOOR sets the limit in GiB (0: it never ends a server).

    Raises:
        UsageError: FLOOR is no number of GiB.
    """
    try:
        here = machine.host_memory(read)
    except SparklingError:
        return None
    end = floor(here.total, env)
    groups = tuple(
        (level.folder, level.version, level.limit)
        for level in memory_limits(read)
        if level.limit < here.host_total
    )
    return memwatch.Limits(
        warn=2 * end, end=end, total=here.total, groups=groups, gpu=gpu and not here.unified
    )
