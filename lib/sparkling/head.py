"""BF16 against FP8 LM head, from a checkpoint's head alone: how often the choice changes, and by how
much the distribution moves, on average and on rare tokens; per-row, per-tensor and block scales.

No torch, no server and no second copy of the head: its rows stream through in chunks, and for every
hidden state only running sums and the top k are kept. e4m3 values are exact in float32, so the logits
differ by the quantization and by nothing else; activations stay as they were recorded (BF16), as in
our plugin's product.

KL(BF16 || FP8) = Σ p·(log p - log q), in nats, p from the BF16 head.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import ml_dtypes
import numpy as np

from sparkling import weightcheck
from sparkling.errors import UsageError
from sparkling.stats import Interval, wilson

SCHEMES = ("per-row", "per-tensor", "block-128")
E4M3_MAX = 448.0
CHUNK_ROWS = 4096  # 4,096 x 2,560 in float32 is 42 MB
TOP = (1, 5, 10)
RARE_SHARE = 0.1
"""Rare positions: those whose following token is among the least frequent, up to this share."""
NAME = "lm_head.weight"
RECORDED = Path(__file__).parent / "recordings" / "sparklet-hidden.npz"


@dataclass(frozen=True)
class States:
    """What a head reads: `hidden` [n, hidden size] float32 and, where known, the token that followed
    each (`targets` [n], else None). `label` says where they come from."""

    hidden: np.ndarray
    targets: np.ndarray | None
    label: str


@dataclass(frozen=True)
class Agreement:
    """One scheme against the BF16 head over n positions.

    top: k -> mean share of the BF16 head's k likeliest tokens that are among the FP8 head's k;
    first: how often the likeliest token is the same, with Wilson's interval; kl: (mean, p99, largest)
    in nats; shift: mean change of the target's log-probability (of the BF16 head's first choice where
    no target is known) and its mean size.
    """

    scheme: str
    group: str  # "all" or "rare"
    n: int
    first: Interval
    top: dict[int, float]
    kl_mean: float
    kl_p99: float
    kl_max: float
    shift_mean: float
    shift_size: float

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "first": self.first.to_json(),
            "top": {str(k): share for k, share in self.top.items()},
        }


@dataclass(frozen=True)
class HeadReport:
    """The comparison of all schemes, and the bytes of each."""

    head: str  # which head, its shape
    states: str  # where the hidden states come from
    agreements: tuple[Agreement, ...]
    bytes: dict[str, int]
    weight_error: dict[str, float]  # root mean square error of the weights over their own
    row_spread: (
        float  # largest entry of the largest row ÷ that of the smallest row that is not zero
    )

    def of(self, scheme: str, group: str = "all") -> Agreement:
        """One scheme's row. UsageError when it was not compared."""
        for one in self.agreements:
            if (one.scheme, one.group) == (scheme, group):
                return one
        raise UsageError(f"There is no row for scheme {scheme!r} on {group!r} positions.")

    def to_json(self) -> dict[str, Any]:
        return {
            "head": self.head,
            "states": self.states,
            "agreements": [one.to_json() for one in self.agreements],
            "bytes": self.bytes,
            "weight_error": self.weight_error,
            "row_spread": self.row_spread,
        }


# -- quantization ----------------------------------------------------------------------------------


def quantize(
    weight: np.ndarray, scheme: str, *, largest: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes of `weight` [rows, columns] and the scales that give it back.

    Returns codes [rows, columns] float8_e4m3fn and scales that broadcast over the weight, float32:
    [rows, 1] per row, [1, 1] per tensor (`largest` is the whole tensor's largest magnitude when
    `weight` is a part of it), [rows, columns] expanded for blocks of 128 x 128. An all-zero row,
    block or tensor keeps scale 1. Raises UsageError for an unknown scheme or values that are not
    finite.
    """
    if not np.isfinite(weight).all():
        raise UsageError("The head holds infinite or NaN weights, which FP8 cannot hold.")
    size = np.abs(weight)
    if scheme == "per-row":
        top = size.max(axis=1, keepdims=True)
    elif scheme == "per-tensor":
        top = np.full((1, 1), size.max() if largest is None else largest, np.float32)
    elif scheme == "block-128":
        top = _blocks(size)
    else:
        raise UsageError(f"A scheme is one of {', '.join(SCHEMES)}, not {scheme!r}.")
    scale = np.where(top > 0, top / E4M3_MAX, 1.0).astype(np.float32)
    codes = np.clip(weight / scale, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return codes, scale


def _blocks(size: np.ndarray, block: int = 128) -> np.ndarray:
    rows, columns = size.shape
    padded = np.zeros((-(-rows // block) * block, -(-columns // block) * block), np.float32)
    padded[:rows, :columns] = size
    shape = (padded.shape[0] // block, block, padded.shape[1] // block, block)
    top = padded.reshape(shape).max(axis=(1, 3))
    return np.repeat(np.repeat(top, block, 0), block, 1)[:rows, :columns]


def scheme_bytes(rows: int, columns: int) -> dict[str, int]:
    """Bytes of the head in BF16 and in each scheme, float32 scales included."""
    codes = rows * columns
    return {
        "BF16": 2 * codes,
        "per-row": codes + 4 * rows,
        "per-tensor": codes + 4,
        "block-128": codes + 4 * (-(-rows // 128)) * (-(-columns // 128)),
    }


# -- what is compared ------------------------------------------------------------------------------


def head_of(checkpoint: Path | str) -> np.ndarray:
    """The LM head of a checkpoint as a memory map [rows, hidden], BF16, F16 or F32: nothing is read
    until it is used. Raises WeightsError for a broken checkpoint, UsageError when there is no head.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise UsageError(f"There is no checkpoint at {folder}.")
    for file, tensors in weightcheck.headers(folder).items():
        if NAME not in tensors:
            continue
        tensor = tensors[NAME]
        kinds: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
        if tensor.dtype not in kinds:
            raise UsageError(
                f"The LM head of {folder} is stored as {tensor.dtype}: only a BF16, F16 or F32 head "
                "can be compared with an FP8 one."
            )
        path = folder / file
        with path.open("rb") as opened:
            data = 8 + int.from_bytes(opened.read(8), "little")
        at = data + tensor.start
        if at % 2:
            raise UsageError(f"The LM head in {path} does not begin at an even byte.")
        return np.memmap(path, kinds[tensor.dtype], "r", offset=at, shape=tensor.shape)
    raise UsageError(f"{folder} has no {NAME}: its embeddings are tied, or it is not whole.")


def read_states(path: Path | str) -> States:
    """Recorded hidden states (`.npz` as `scripts/record_hidden.py` writes). Raises UsageError."""
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as data:
            held = {name: data[name] for name in data.files}
        hidden, targets = held["hidden"], held.get("targets")
        label = str(held.get("label", path.name))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        # Of whatever is no .npz file numpy says that it could be unpickled, which nobody should.
        why = "it is no .npz file" if "pickle" in str(error) else error
        raise UsageError(f"{path} holds no recorded hidden states ({why}).") from None
    if hidden.dtype == np.uint16:
        hidden = hidden.view(ml_dtypes.bfloat16)
    if hidden.ndim != 2 or not len(hidden) or (targets is not None and len(targets) != len(hidden)):
        raise UsageError(f"{path} does not hold one hidden state and one target for each position.")
    return States(hidden.astype(np.float32), targets, label)


def gaussian_states(size: int, *, n: int = 256, seed: int = 0) -> States:
    """Hidden states of no text at all: independent normal entries, the length a norm would give."""
    hidden = np.random.default_rng(seed).standard_normal((n, size)).astype(np.float32)
    hidden = hidden.astype(ml_dtypes.bfloat16).astype(np.float32)
    return States(
        hidden, None, f"{n} random directions (seed {seed}): no text, so no typical figure"
    )


def states_for(checkpoint: Path | str, hidden: Path | str | None = None) -> States:
    """The recorded states of a checkpoint: the file given, else Sparklet's own recording for
    Sparklet, else random directions of the right size."""
    if hidden is not None:
        return read_states(hidden)
    size = head_of(checkpoint).shape[1]
    if _is_sparklet(Path(checkpoint)):
        return read_states(RECORDED)
    return gaussian_states(size)


def _is_sparklet(folder: Path) -> bool:
    try:
        settings = json.loads((folder / "settings.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and folder.resolve().name == "sparklet"


def of_checkpoint(
    checkpoint: Path | str, hidden: Path | str | None = None, *, name: str = ""
) -> HeadReport:
    """`compare` for a checkpoint's head, on the hidden states that `states_for` finds."""
    return compare(
        head_of(checkpoint), states_for(checkpoint, hidden), name=name or str(checkpoint)
    )


# -- the comparison --------------------------------------------------------------------------------


class _Running:
    """Sums over the vocabulary so far: log Σ exp of both heads, Σ p (l - l'), and the top k."""

    def __init__(self, n: int, k: int) -> None:
        self.max_p = np.full(n, -np.inf)
        self.max_q = np.full(n, -np.inf)
        self.z_p, self.z_q, self.cross = np.zeros(n), np.zeros(n), np.zeros(n)
        self.top_p, self.top_q = _Top(n, k), _Top(n, k)
        self.target_p, self.target_q = np.zeros(n), np.zeros(n)

    def add(self, p: np.ndarray, q: np.ndarray, start: int, targets: np.ndarray | None) -> None:
        """p, q [n, rows]: logits of both heads for vocabulary entries from `start` on."""
        new_p = np.maximum(self.max_p, p.max(axis=1))
        new_q = np.maximum(self.max_q, q.max(axis=1))
        keep = np.exp(self.max_p - new_p)
        weight = np.exp(p - new_p[:, None], dtype=np.float64)
        self.z_p = self.z_p * keep + weight.sum(axis=1)
        self.cross = self.cross * keep + (weight * (p - q)).sum(axis=1)
        self.z_q = self.z_q * np.exp(self.max_q - new_q)
        self.z_q += np.exp(q - new_q[:, None], dtype=np.float64).sum(axis=1)
        self.max_p, self.max_q = new_p, new_q
        self.top_p.add(p, start)
        self.top_q.add(q, start)
        if targets is not None:
            inside = np.flatnonzero((targets >= start) & (targets < start + p.shape[1]))
            self.target_p[inside] = p[inside, targets[inside] - start]
            self.target_q[inside] = q[inside, targets[inside] - start]

    @property
    def log_z(self) -> tuple[np.ndarray, np.ndarray]:
        return self.max_p + np.log(self.z_p), self.max_q + np.log(self.z_q)

    def kl(self) -> np.ndarray:
        log_p, log_q = self.log_z
        return np.maximum(self.cross / self.z_p - log_p + log_q, 0.0)


class _Top:
    """The k largest logits so far and their ids; ties go to the lower id, as argmax does."""

    def __init__(self, n: int, k: int) -> None:
        self.k = k
        self.values = np.empty((n, 0), np.float32)
        self.ids = np.empty((n, 0), np.int64)

    def add(self, logits: np.ndarray, start: int) -> None:
        ids = np.broadcast_to(np.arange(start, start + logits.shape[1]), logits.shape)
        if logits.shape[1] > 4 * self.k:  # a stable sort of few instead of many
            part = np.sort(np.argpartition(-logits, self.k, axis=1)[:, : self.k + 1], axis=1)
            logits = np.take_along_axis(logits, part, 1)
            ids = np.take_along_axis(ids, part, 1)
        values = np.concatenate([self.values, logits], axis=1)
        every = np.concatenate([self.ids, ids], axis=1)
        order = np.argsort(-values, axis=1, kind="stable")[:, : self.k]
        self.values = np.take_along_axis(values, order, 1)
        self.ids = np.take_along_axis(every, order, 1)


def compare(
    head: np.ndarray,
    states: States,
    *,
    schemes: Sequence[str] = SCHEMES,
    name: str = "",
    chunk_rows: int = CHUNK_ROWS,
) -> HeadReport:
    """Compare FP8 heads with the head itself on these hidden states.

    head [rows, hidden], any float dtype, possibly a memory map; one pass over it (two with a
    per-tensor scale, which needs the largest magnitude first). Memory beyond the map: some chunks of
    `chunk_rows` x hidden and n x `chunk_rows` in float32. Raises UsageError when sizes do not fit.
    """
    rows, size = head.shape
    if states.hidden.shape[1] != size:
        raise UsageError(
            f"The hidden states have {states.hidden.shape[1]} entries and the head reads {size}: "
            "they were recorded with another model."
        )
    for scheme in schemes:
        if scheme not in SCHEMES:
            raise UsageError(f"A scheme is one of {', '.join(SCHEMES)}, not {scheme!r}.")
    if chunk_rows % 128:
        raise UsageError(f"chunk_rows is {chunk_rows}: blocks need a multiple of 128.")
    targets = states.targets
    if targets is not None and len(targets) and not 0 <= targets.min() <= targets.max() < rows:
        raise UsageError(f"A target lies outside the head's {rows:,} rows: another tokenizer's.")
    n, most = len(states.hidden), min(max(TOP), rows)
    largest = None
    if "per-tensor" in schemes:
        largest = max(float(np.abs(part).max()) for _, part in _chunks(head, chunk_rows))
    running = {scheme: _Running(n, most) for scheme in schemes}
    error, total = dict.fromkeys(schemes, 0.0), 0.0
    small, large = np.inf, 0.0
    for start, weight in _chunks(head, chunk_rows):
        logits = states.hidden @ weight.T
        total += float(np.square(weight, dtype=np.float64).sum())
        tops = np.abs(weight).max(axis=1)
        small = min(small, float(tops[tops > 0].min(initial=np.inf)))
        large = max(large, float(tops.max()))
        for scheme in schemes:
            codes, scale = quantize(weight, scheme, largest=largest)
            back = codes.astype(np.float32) * scale
            error[scheme] += float(np.square(back - weight, dtype=np.float64).sum())
            running[scheme].add(logits, states.hidden @ back.T, start, targets)
    groups = {"all": np.arange(n)}
    rare = rare_positions(targets)
    if rare is not None:
        groups["rare"] = rare
    found = [
        _agreement(scheme, group, running[scheme], at, targets is not None)
        for scheme in schemes
        for group, at in groups.items()
    ]
    sizes = scheme_bytes(rows, size)
    return HeadReport(
        head=f"{name or 'head'}, {rows:,} x {size:,}, {head.dtype}",
        states=f"{states.label}; n={n}",
        agreements=tuple(found),
        bytes={key: sizes[key] for key in ("BF16", *schemes)},
        weight_error={s: (error[s] / total) ** 0.5 if total else 0.0 for s in schemes},
        row_spread=large / small if large else 1.0,
    )


def rare_positions(targets: np.ndarray | None, share: float = RARE_SHARE) -> np.ndarray | None:
    """Positions whose following token is rarest in this text, the rarest first and whole tokens only,
    up to `share` of all positions; at least the once-only ones. None without targets or rare ones."""
    if targets is None or not len(targets):
        return None
    counts = Counter(int(t) for t in targets)
    kept: set[int] = set()
    taken = 0
    for token, count in sorted(counts.items(), key=lambda item: (item[1], item[0])):
        if kept and taken + count > share * len(targets) and count > 1:
            break
        kept.add(token)
        taken += count
    at = np.flatnonzero(np.isin(targets, list(kept)))
    return at if 0 < len(at) < len(targets) else None


def _chunks(head: np.ndarray, rows: int) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, head.shape[0], rows):
        yield start, np.asarray(head[start : start + rows]).astype(np.float32)


def _agreement(scheme: str, group: str, run: _Running, at: np.ndarray, targeted: bool) -> Agreement:
    p, q = run.top_p.ids[at], run.top_q.ids[at]
    same = int((p[:, 0] == q[:, 0]).sum())
    top = {
        k: float(
            np.mean([len(set(a) & set(b)) / k for a, b in zip(p[:, :k], q[:, :k], strict=True)])
        )
        for k in TOP
        if k <= p.shape[1]
    }
    kl = run.kl()[at]
    log_p, log_q = (z[at] for z in run.log_z)
    if targeted:
        shift = (run.target_q[at] - log_q) - (run.target_p[at] - log_p)
    else:
        first = run.top_p.values[at, 0] - log_p
        match = run.top_q.ids[at] == p[:, :1]
        seen = match.any(axis=1)
        value = np.where(match, run.top_q.values[at], 0).sum(axis=1) - log_q
        shift = (value - first)[seen]
    return Agreement(
        scheme,
        group,
        len(at),
        wilson(same, len(at)),
        top,
        float(kl.mean()),
        float(np.percentile(kl, 99)),
        float(kl.max()),
        float(shift.mean()) if len(shift) else 0.0,
        float(np.abs(shift).mean()) if len(shift) else 0.0,
    )
