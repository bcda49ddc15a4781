"""What a BailingMoeV3 checkpoint consists of: bytes by component and dtype.

From the headers of its safetensors files (no weight is read), or, where there are no weights, from
`config.json` alone. The full-size model's sizes come with the package (`FLASH`), so that its
inventory can be shown on a machine that does not hold it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from sparkling import architecture, traffic, weightcheck
from sparkling.architecture import Shape, expected, fits, unused
from sparkling.errors import UsageError
from sparkling.traffic import NEXTN, StepBytes

__all__ = [
    "FLASH",
    "Component",
    "Inventory",
    "component",
    "expected",
    "fits",
    "flash_config",
    "inventory",
    "unused",
]

FLASH = "ling-3.0-flash"
"""The full-size model's name here, as its recipe has it."""

_FACTS = Path(__file__).parent / "facts"
# Bits of one element. FP4 codes come two in an I8.
_BITS = weightcheck._BITS
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_KINDS = (
    (".shared_experts.", "shared expert"),
    (".experts.", "routed experts"),
    (".mlp.gate.", "router"),
    (".mlp.", "dense MLP"),
    (".eh_proj.", "projection"),
    ("norm.", "norms"),
)
_WHOLE = {
    "model.word_embeddings": "embeddings",
    "lm_head": "LM head",
    "model.norm": "norms",
}


@dataclass(frozen=True)
class Component:
    """All tensors of one part of the model that have one dtype."""

    name: str
    dtype: str  # safetensors' name
    bytes: int
    tensors: int


@dataclass(frozen=True)
class Inventory:
    """A checkpoint's bytes. `sizes` adds up components of one name, over their dtypes, and holds
    "MLA kv_b" (a share of "MLA attention") beside them, which a decode step reads in BF16."""

    source: str  # "headers of …" or "configuration of …"
    model: str  # the folder's or the model's name
    components: tuple[Component, ...]
    sizes: Mapping[str, int]
    shape: Shape | None  # None: an architecture or quantization whose shapes we do not know
    why_no_shape: str = ""

    @property
    def bytes_total(self) -> int:
        return sum(part.bytes for part in self.components)

    @property
    def tensors(self) -> int:
        return sum(part.tensors for part in self.components)

    def step_bytes(
        self,
        positions: int = 1,
        union: float | None = None,
        *,
        context: int = 0,
        head: str = "BF16",
    ) -> StepBytes:
        """Traffic of a decode step, or of a verification of `positions`. union: experts read a
        layer (default: the expected number). head: BF16 or FP8. Raises UsageError."""
        return traffic.step(self.known(), self.sizes, positions, union, context=context, head=head)

    def draft_bytes(
        self,
        positions: int = 1,
        union: float | None = None,
        *,
        context: int = 0,
        head: str = "BF16",
    ) -> StepBytes:
        """Traffic of one pass of the NEXTN layer; arguments as for `step_bytes`."""
        return traffic.draft(self.known(), self.sizes, positions, union, context=context, head=head)

    def round_bytes(
        self,
        steps: int = 3,
        union: float | None = None,
        *,
        context: int = 0,
        head: str = "BF16",
    ) -> StepBytes:
        """Traffic of one round of speculation with `steps` draft tokens (verification of
        `steps` + 1 and all draft passes); arguments as for `step_bytes`."""
        return traffic.rounds(self.known(), self.sizes, steps, union, context=context, head=head)

    def known(self) -> Shape:
        """The shape. Raises UsageError with the reason when it is not known."""
        if self.shape is None:
            raise UsageError(
                f"The bytes of a step of {self.model} are unknown: {self.why_no_shape}"
            )
        return self.shape

    def rows(self) -> list[dict[str, Any]]:
        """Largest first, as rows for a table."""
        total = self.bytes_total
        ordered = sorted(self.components, key=lambda part: (-part.bytes, part.name, part.dtype))
        return [
            {
                "component": part.name,
                "dtype": part.dtype,
                "tensors": part.tensors,
                "MB": part.bytes / 1e6,
                "%": 100 * part.bytes / total,
            }
            for part in ordered
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "source": self.source,
            "bytes": self.bytes_total,
            "tensors": self.tensors,
            "components": [vars(part) for part in self.components],
        }


def inventory(where: Path | str | Mapping[str, Any] | Any) -> Inventory:
    """The inventory of a checkpoint folder, of a recipe, or of a configuration.

    where: a folder with `config.json` and weights (headers are read) or without any (the
    configuration decides); a `recipe.Recipe`, whose model is taken, or for the full-size recipe the
    sizes that come with the package while the model is not there; the parsed `config.json`; or
    FLASH. Raises WeightsError for a broken checkpoint, UsageError for an unknown architecture.
    """
    if isinstance(where, Mapping):
        return _from_config(where, str(where.get("model_type", "model")), "the given configuration")
    if where == FLASH:
        return _flash_inventory()
    if hasattr(where, "ladder"):  # a recipe.Recipe, which is above this module
        if not (where.model / "config.json").is_file() and where.name == FLASH:
            return inventory(FLASH)
        return inventory(where.model)
    folder = Path(where)
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(
            f"There is no checkpoint at {folder} (no config.json): download it, or name another."
        )
    config = _config(path)
    if not any(folder.glob("*.safetensors")) and not (folder / weightcheck.INDEX).is_file():
        return _from_config(config, folder.name, f"{path}, for there are no weights")
    found = [
        (tensor.name, tensor.dtype, tensor.end - tensor.start)
        for file in weightcheck.headers(folder).values()
        for tensor in file.values()
    ]
    layers = config.get("num_hidden_layers")
    shape, why = None, ""
    try:
        shape = architecture.shape(config)
    except UsageError as error:
        why = str(error)
    if type(layers) is not int:
        raise UsageError(f"{path} has no num_hidden_layers, so its layers cannot be told apart.")
    source = f"the headers of {len(found):,} tensors"
    return _build(found, layers, shape, folder.name, source, why)


def of_lane(lane: Any) -> Inventory:
    """The inventory of a lane's checkpoint, or of the full-size model where there is none yet."""
    return inventory(lane.model if (lane.model / "config.json").is_file() else FLASH)


@cache
def _flash() -> dict[str, Any]:
    return tomllib.loads((_FACTS / f"{FLASH}.toml").read_text("utf-8"))


@cache
def _flash_inventory() -> Inventory:
    return _from_config(_flash(), FLASH, "the sizes that come with this package")


def flash_config() -> dict[str, Any]:
    """The full-size model's configuration, as far as sizes follow from it."""
    return json.loads(json.dumps(_flash()))


def component(name: str, layers: int, mla: frozenset[int] | set[int]) -> str:
    """The component that a tensor belongs to. layers: of the target; mla: indices of MLA layers."""
    match = _LAYER.match(name)
    if match is None:
        return next(
            (part for start, part in _WHOLE.items() if name.startswith(f"{start}.")), "other"
        )
    layer = int(match[1])
    prefix = NEXTN if layer >= layers else ""
    if ".attention." in name:
        return f"{prefix}{'MLA' if layer in mla else 'KDA'} attention"
    return prefix + next((part for key, part in _KINDS if key in name), "other")


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not readable JSON: fetch the configuration again.") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} does not hold a table: fetch the configuration again.")
    return config


def _from_config(config: Mapping[str, Any], model: str, source: str) -> Inventory:
    shape = architecture.shape(config)
    tensors = [
        (name, dtype, (prod(size) * _BITS[dtype] + 7) // 8)
        for name, (dtype, size) in expected(config).items()
    ]
    return _build(tensors, shape.layers, shape, model, source, "")


def _build(
    tensors: Iterable[tuple[str, str, int]],
    layers: int,
    shape: Shape | None,
    model: str,
    source: str,
    why: str,
) -> Inventory:
    tensors = list(tensors)
    mla = {
        int(match[1])
        for name, _, _ in tensors
        if ".kv_b_proj." in name and (match := _LAYER.match(name))
    }
    counted: dict[tuple[str, str], list[int]] = {}
    up: dict[str, int] = {}
    for name, dtype, size in tensors:
        part = component(name, layers, mla)
        count = counted.setdefault((part, dtype), [0, 0])
        count[0] += size
        count[1] += 1
        if ".kv_b_proj." in name:
            key = part.replace("attention", "kv_b")
            up[key] = up.get(key, 0) + size
    components = tuple(
        Component(part, dtype, size, number) for (part, dtype), (size, number) in counted.items()
    )
    sizes: dict[str, int] = {}
    for one in components:
        sizes[one.name] = sizes.get(one.name, 0) + one.bytes
    return Inventory(source, model, components, {**sizes, **up}, shape, why)
