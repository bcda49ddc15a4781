"""What a recipe may not say: contradictions, secrets, and doors left open.

Each rule names the table and key that brought the conflict in, so that the sentence points at the
line to change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkling import _flags
from sparkling._toml import closest, sentence
from sparkling.errors import UsageError

if TYPE_CHECKING:
    from sparkling.recipe import Delta

SWITCHES = ("humming", "fp8-head", "nextn")

FP8_HEAD_VARIABLES = ("SPARKLING_FP8_LM_HEAD", "SGLANG_ENABLE_FP8_LM_HEAD")
# SPARKLING_STATUS_FILE is not among them: `server.start` sets it, per start.
TRAP = "SPARKLING_TRAP"
TRAPS = ("tensor-only",)
CLAMP = "SPARKLING_SWIGLU_CLAMP"
# The experts' kernels that obey Ling's SwiGLU limit with the plugin's switch (sparkling_sglang/clamp.py).
CLAMPING = ("auto", "humming", "marlin", "triton", "flashinfer_mxfp4")
PLUGIN_VARIABLES = ("SPARKLING_FP8_LM_HEAD", "SPARKLING_SHARE_HEAD", TRAP, CLAMP)

# What the plugin's head refuses at start-up (sparkling_sglang/head_refusals.py), refused before that:
# flag, the values that forbid it (None: any), and why.
HEAD_FORBIDS: tuple[tuple[str, tuple[Any, ...] | None, str], ...] = (
    ("enable-lora", None, "the FP8 head cannot carry LoRA adapters"),
    ("lora-paths", None, "the FP8 head cannot carry LoRA adapters"),
    ("enable-multi-layer-eagle", None, "its drafts get the head's tensor without its scales"),
    ("speculative-token-map", None, "it takes rows of the FP8 head without their scales"),
    (
        "startup-weight-load-mode",
        ("overlap",),
        "the head is quantized before the weights are there",
    ),
    ("weight-cache-mode", ("daemon", "client"), "another process would keep the BF16 head"),
    (
        "remote-instance-weight-loader-start-seed-via-transfer-engine",
        None,
        "it would hand out the memory of the BF16 head, which is gone",
    ),
    ("rl-on-policy-target", None, "the FP8 head changes the logits that a trainer expects"),
)

# SGLang resolves NEXTN to EAGLE, and for Ling both mean the checkpoint's own NextN layer.
NEXTN = ("NEXTN", "EAGLE")
ALGORITHMS = (*NEXTN, "EAGLE3", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
NEXTN_NUMBERS = (
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
)

_RENDERED = {
    "model-path": "the checkpoint is given to render",
    "served-model-name": "write served_name at the top instead",
    "port": "the port is given to render",
    "config": "a second file would hide flags from the recipe's checks",
}
_SECRET_FLAG = re.compile(r"(^|-)(api-key|key|password|secret)(-|$)")
_SECRET_VARIABLE = re.compile(
    r"(^|_)(KEY|APIKEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)($|_)"
    r"|(^|_)(HF|HUB|HUGGINGFACE|ACCESS|AUTH|API|BEARER|GITHUB|GITLAB|MODELSCOPE|WANDB)_TOKEN($|_)"
)
_SECRET_VALUE = re.compile(
    r"(^|[^A-Za-z0-9])(sk-[A-Za-z0-9_-]{8,}|hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{8,}"
    r"|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[abprs]-[\w-]{8,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}|Bearer\s+\S+)|://[^/\s:@]+:[^/\s@]+@"
)


@dataclass
class Settings:
    """Flags and variables while deltas are laid over them, and where each came from."""

    shown: str
    known: _flags.Known
    gpus: int
    flags: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def apply(self, delta: Delta, *, strict: bool = False) -> None:
        """Lay `delta` over this. A replaced flag keeps its place in the order.

        `strict` refuses a value that changes nothing: a stage's delta is what it really differs in.
        """
        where = delta.where
        if strict:
            for kind, have, new in (
                ("flags", self.flags, delta.flags),
                ("env", self.env, delta.env),
            ):
                for name, value in new.items():
                    if name in have and have[name] == value:
                        raise UsageError(
                            f"{self.shown}, table [{where}.{kind}], key {name}: is what the parent "
                            "has already."
                        )
        for kind, have, names in (
            ("flags", self.flags, delta.unset_flags),
            ("env", self.env, delta.unset_env),
        ):
            for name in names:
                if name not in have:
                    raise UsageError(
                        sentence(
                            f"{self.shown}, table [{where}], key unset_{kind}: unsets {name}, "
                            f"which is not set there{closest(name, have)}"
                        )
                    )
                del have[name]
        for name, value in delta.flags.items():
            self.flags[name] = value
            self.origin[name] = f"{where}.flags"
        for name, value in delta.env.items():
            self.env[name] = value
            self.origin[name] = f"{where}.env"

    def refuse(self, key: str, why: str) -> UsageError:
        return UsageError(
            sentence(f"{self.shown}, table [{self.origin.get(key, 'shared')}], key {key}: {why}")
        )

    def switches(self) -> dict[str, bool]:
        """Return which optimizations these settings ask for."""
        return {
            "humming": self.flags.get("moe-runner-backend") == "humming",
            "fp8-head": any(self.env.get(name) == "1" for name in FP8_HEAD_VARIABLES),
            "nextn": self.flags.get("speculative-algorithm") in NEXTN,
        }


def forbidden_flag(name: str, value: Any) -> str | None:
    """Return why a recipe may not set this flag so, or None."""
    if _SECRET_FLAG.search(name):
        return "a recipe holds no secrets; the API key is given when the server starts"
    if name == "host":
        return f"the host is always loopback and given to render, so {value!r} has no place here"
    if name in _RENDERED:
        return f"{_RENDERED[name]}, so it has no place here"
    return "its value looks like a secret, and a recipe holds none" if _secret(value) else None


def forbidden_variable(name: str, value: str) -> str | None:
    """Return why a recipe may not set this variable so, or None."""
    if name == "SPARKLING_STATUS_FILE":
        return "the place of the status file is chosen at each start"
    if name in (*FP8_HEAD_VARIABLES, CLAMP) and value not in ("0", "1"):
        return f'is "1" or "0", not {value!r}'
    if name == TRAP and value not in TRAPS:
        return f"is one of {', '.join(TRAPS)}, not {value!r}"
    if _SECRET_VARIABLE.search(name):
        return "a recipe holds no secrets; export it in your own shell instead"
    return "its value looks like a secret, and a recipe holds none" if _secret(value) else None


def _secret(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_secret(item) for item in value.values())
    if isinstance(value, list):
        return any(_secret(item) for item in value)
    return isinstance(value, str) and _SECRET_VALUE.search(value) is not None


def check(settings: Settings, sizes: dict[str, int]) -> None:
    """Raise UsageError on the first contradiction in a whole stage."""
    for rule in (_head, _moe, _speculation, _trap, _gpus):
        rule(settings)
    _context(settings, sizes)


def _head(s: Settings) -> None:
    on = [name for name in FP8_HEAD_VARIABLES if s.env.get(name) == "1"]
    if len(on) > 1:
        raise s.refuse(on[1], f"{on[0]} is on too, and one head cannot be quantized twice")
    if on and "enable-fp32-lm-head" in s.flags:
        raise s.refuse(
            on[0], "contradicts enable-fp32-lm-head: the head is FP8 or FP32, so unset one of them"
        )
    if FP8_HEAD_VARIABLES[0] not in on:
        return  # the fork's own head: what it goes with is the fork's business
    for name in ("tp-size", "pp-size"):
        if s.flags.get(name, 1) > 1:
            raise s.refuse(
                on[0], f"contradicts {name} {s.flags[name]}: the FP8 head works on one device"
            )
    for name, values, why in HEAD_FORBIDS:
        if name in s.flags and (values is None or s.flags[name] in values):
            raise s.refuse(on[0], f"contradicts {name}: {why}, so unset one of them")


def _moe(s: Settings) -> None:
    target = s.flags.get("moe-runner-backend")
    draft = s.flags.get("speculative-moe-runner-backend")
    if draft is not None and draft != target:
        raise s.refuse(
            "speculative-moe-runner-backend",
            f"asks for a second MoE backend, {draft} beside {target or 'the automatic one'}; no "
            "proof could say which of them a layer runs",
        )
    if s.env.get(CLAMP) == "1" and target not in (None, *CLAMPING):
        raise s.refuse(
            CLAMP,
            f"contradicts moe-runner-backend {target}, which applies no SwiGLU limit: take one of "
            f"{', '.join(CLAMPING[1:])}",
        )


def _speculation(s: Settings) -> None:
    algorithm = s.flags.get("speculative-algorithm")
    given = [name for name in s.flags if name.startswith("speculative-")]
    if algorithm is None:
        if given:
            raise s.refuse(given[0], "is given without speculative-algorithm")
        return
    if algorithm not in ALGORITHMS:
        raise s.refuse(
            "speculative-algorithm",
            f"{algorithm!r} is none of {', '.join(ALGORITHMS)}{closest(algorithm, ALGORITHMS)}",
        )
    if algorithm not in NEXTN:
        return
    missing = [name for name in NEXTN_NUMBERS if name not in s.flags]
    if missing:
        raise s.refuse(
            "speculative-algorithm",
            f"{algorithm} needs all of its numbers, and {', '.join(missing)} is missing",
        )
    steps, topk, draft = (s.flags[name] for name in NEXTN_NUMBERS)
    for name, value in zip(NEXTN_NUMBERS, (steps, topk, draft), strict=True):
        if value < 1:
            raise s.refuse(name, f"must be at least 1, not {value}")
    if topk == 1 and draft != steps + 1:
        raise s.refuse(
            NEXTN_NUMBERS[2],
            f"is {draft}, but a chain (top-k 1) of {steps} steps has {steps + 1} draft tokens",
        )
    # A tree grows topk nodes in its first step and topk² in each later one, beside the root.
    most = 1 + topk + (steps - 1) * topk * topk
    if not 2 <= draft <= most:
        raise s.refuse(
            NEXTN_NUMBERS[2],
            f"is {draft}, but {steps} steps at top-k {topk} give 2 to {most} draft tokens",
        )


def _trap(s: Settings) -> None:
    if TRAP in s.env and s.env.get("SPARKLING_SHARE_HEAD") == "1":
        raise s.refuse(TRAP, "contradicts SPARKLING_SHARE_HEAD = 1, which shares the whole head")


def _gpus(s: Settings) -> None:
    tp, pp = s.flags.get("tp-size", 1), s.flags.get("pp-size", 1)
    if tp * pp != s.gpus:
        key = "tp-size" if "tp-size" in s.flags else "pp-size"
        raise s.refuse(
            key,
            f"tp-size {tp} × pp-size {pp} needs {tp * pp} GPUs, but gpus says {s.gpus}",
        )
    ep = s.flags.get("ep-size", 1)
    if ep < 1 or tp % ep:
        raise s.refuse("ep-size", f"{ep} does not divide tp-size {tp}")


def _context(s: Settings, sizes: dict[str, int]) -> None:
    context = s.flags.get("context-length")
    longest = sizes.get("shape_input", 0) + sizes.get("shape_output", 0)
    if context is not None and longest > context:
        raise s.refuse(
            "context-length",
            f"is {context}, but [sizes] asks for shape_input + shape_output = {longest} tokens",
        )
