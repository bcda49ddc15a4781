"""A tiny Ling-3.0 checkpoint, built in a second, for machines without a GPU.

The architecture is Ling's (`BailingMoeV3ForCausalLM`: KDA, gated MLA, a mixture of experts with a
shared one, one NEXTN layer), so SGLang runs every part of its path. The weights are *constructed*,
not trained: the residual stream is dominated by the token embedding, the LM head maps each word to
its successors (`tinytext` holds the chains), and five heads of the MLA layer look for markers in
the context (tools on offer, a tool's result, a city, a sky, a subject), so the answer depends on
the conversation. NEXTN predicts from the embedding and those same facts through a projection with
noise, so it is right for some words and wrong for others.

Because the embedding dominates, this checkpoint proves that a *path* works, not that every kernel
is exact. `random=True` builds a truly random checkpoint of the same shape for that purpose.

The bytes depend on the arguments alone: own integer-based noise, no matrix products, own
safetensors writer. `sparkling.json` beside the weights lists the SHA-256 of every file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sparkling import tinytext as text
from sparkling.errors import UsageError
from sparkling.files import os_error

MANIFEST = "sparkling.json"

# Scale between `noise` and the deviation of the draft's error, chosen so that the default of 0.12
# gives an accept length near 2.5 (three draft steps).
_NOISE_GAIN = 24.0
# Identity entries of words marked easy, in its first and second half (same norm): the noise of the
# draft comes in by the second. Accept length 3.0 to 3.5 for them, so never a perfect 4.
_LEAN = (1.203125, 0.7421875)
_GAIN = 14.0  # logit of the likeliest successor
_BRANCH = 6.0  # how far a fact lifts one continuation above another
_BACKGROUND = -6.0  # logit of tokens that no chain contains


@dataclass(frozen=True)
class Dims:
    """Sizes of the model; the defaults suit the constructed checkpoint.

    `layers` counts the decoder layers without the NEXTN one; every `group`-th is gated MLA, the
    others are KDA. The first layer has a dense MLP, all later ones a mixture of experts.
    """

    hidden: int = 192
    layers: int = 4
    group: int = 4
    heads: int = 8
    head_dim: int = 32
    kv_rank: int = 64
    nope: int = 32
    rope: int = 16
    v_dim: int = 32
    experts: int = 8
    top_k: int = 2
    expert_groups: int = 4
    top_groups: int = 2
    moe_width: int = 64
    mlp_width: int = 256
    conv: int = 4
    context: int = 4096


class _Noise:
    """Normal-like noise that is the same on every machine.

    A sum of four 16-bit integers, drawn from PCG64's raw output: integer arithmetic, then one
    rounding to float32. Each tensor has its own stream, so adding one does not move the others.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, name: str, *shape: int, scale: float = 1.0) -> np.ndarray:
        count = int(np.prod(shape))
        stream = np.random.PCG64(np.random.SeedSequence([self.seed, zlib.crc32(name.encode())]))
        parts = stream.random_raw(count).view(np.uint16).reshape(count, 4)
        total = parts.astype(np.int64).sum(axis=1) - 2 * 65535
        deviation = (4 * (65536.0**2 - 1) / 12) ** 0.5
        return (total.astype(np.float32) * np.float32(scale / deviation)).reshape(shape)


# --------------------------------------------------------------------------------- the words


class _Map:
    """Tokens, their ids and the weighted edges between them."""

    def __init__(self) -> None:
        self.words: dict[str, None] = {}
        self.edges: dict[tuple[str, str], float] = {}  # (token, next) -> log weight
        self.branches: list[tuple[str, str, dict[str, float], float]] = []
        self.easy: set[str] = set()
        self._paths()

    def _word(self, token: str) -> None:
        if token not in text.HIDDEN and token not in text.SHOWN:
            self.words.setdefault(token)

    def _edge(self, source: str, target: str, weight: float) -> None:
        self._word(source)
        self._word(target)
        known = self.edges.setdefault((source, target), weight)
        assert known == weight, (source, target)

    def _path(self, *slots: Iterable[str]) -> None:
        shares = {1: (1.0,), 2: (0.7, 0.3), 3: (0.6, 0.25, 0.15)}
        listed = [tuple(slot) for slot in slots]
        for here, after in itertools.pairwise(listed):
            for source in here:
                for target, share in zip(after, shares[len(after)], strict=True):
                    self._edge(source, target, float(np.log(share)))

    def _branch(self, source: str, target: str, facts: dict[str, float], base: float) -> None:
        """After `source`, `target` has logit gain+base, plus what the facts add."""
        self._word(target)
        self.branches.append((source, target, facts, base))

    def _paths(self) -> None:
        self._path(("<think>",), *text.chain(text.REASONING), ("</think>",))
        # An answer may begin after thinking, or (with ignore_eos) after the end of another one.
        starts = {"</think>": "", text.END: " "}
        story, weather = text.chain(text.STORY), text.chain(text.WEATHER)
        count = text.chain(text.COUNT)
        for source, blank in starts.items():
            lowers = {fact: -_BRANCH for fact in ("tools", "result", "code", "count")}
            first = blank + story[0][0]
            self._path((first,), story[1])
            self._branch(source, first, lowers, 0.0)
            self._branch(source, text.CODE[0], {"code": _BRANCH, "tools": -2 * _BRANCH}, -_BRANCH)
            first = blank + count[0][0]
            self._path((first,), count[1])
            self._branch(source, first, {"count": _BRANCH, "tools": -2 * _BRANCH}, -_BRANCH)
            self._branch(
                source, "<tool_call>", {"tools": _BRANCH, "result": -2 * _BRANCH}, -_BRANCH
            )
            first = blank + weather[0][0]
            self._branch(source, first, {"result": _BRANCH}, -_BRANCH)
            for city in text.CITIES:
                self._branch(first, " " + city, {f"city:{city}": _BRANCH}, -_BRANCH)
            self._branch(first, " somewhere", {}, -_BRANCH / 2)
        self.start = " " + story[0][0]  # after any word that no chain contains
        self._path(*story[1:], (text.END,))
        self._path(*[(piece,) for piece in text.CODE], (text.END,))
        self._path(*count[1:], (text.END,))
        self.easy.update(text.CODE, (slot[0] for slot in count))

        cities = [" " + city for city in (*text.CITIES, "somewhere")]
        skies = [" " + sky for sky in (*text.SKIES, "uncertain")]
        for city in cities:
            self._path((city,), weather[2])
        self._path(*weather[2:4])
        for sky in skies:
            facts = {} if sky == " uncertain" else {f"sky:{sky[1:]}": _BRANCH}
            base = -_BRANCH / 2 if sky == " uncertain" else -_BRANCH
            self._branch(weather[3][0], sky, facts, base)
            self._path((sky,), weather[5])
        self._path(*weather[5:], (text.END,))

        call = ("<tool_call>", "get", "_", "weather", "<arg_key>", "city", "</arg_key>")
        self._path(*[(piece,) for piece in call], ("<arg_value>",))
        for city in text.CITIES:
            self._branch("<arg_value>", city, {f"city:{city}": _BRANCH}, -_BRANCH)
            self._path((city,), ("</arg_value>",))
        self._branch("<arg_value>", "here", {}, -_BRANCH / 2)
        self._path(("here",), ("</arg_value>",), ("</tool_call>",), (text.END,))

        for word in (*text.COMMON, *text.SKIES, *text.CITIES, *sum(text.TOPICS.values(), ())):
            self._word(word)
            self._word(" " + word)


def _facts() -> dict[str, tuple[int, tuple[str, ...]]]:
    """Fact -> (MLA head that looks for it, tokens that state it)."""
    facts: dict[str, tuple[int, tuple[str, ...]]] = {
        "tools": (0, ("<tools>",)),
        "result": (1, ("<tool_response>",)),
    }
    for city in text.CITIES:
        facts[f"city:{city}"] = (2, (city, " " + city))
    for sky in text.SKIES:
        facts[f"sky:{sky}"] = (3, (sky, " " + sky))
    for topic, words in text.TOPICS.items():
        facts[topic] = (4, tuple(blank + word for word in words for blank in ("", " ")))
    return facts


# ----------------------------------------------------------------------------- the tokenizer

# One token per word with its leading blank and trailing mark; numbers of at most two digits.
_SPLIT = r" ?\p{L}+[.,:;]?| ?\p{N}{1,2}[.,]?| ?[^\s\p{L}\p{N}]+|\s+"


def _tokenizer(words: Iterable[str]) -> tuple[str, dict[str, int]]:
    """The tokenizer file's text and the ids: 256 bytes, then words, then special tokens."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    ids: dict[str, int] = {}
    for word in words:
        symbols = "".join(piece for piece, _ in to_bytes.pre_tokenize_str(word))
        ids[word] = vocab.setdefault(symbols, len(vocab))
    # ignore_merges: a piece that is a word of the vocabulary is that token, else it is bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"), to_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    hidden = [AddedToken(t, special=True, normalized=False) for t in text.HIDDEN]
    shown = [AddedToken(t, special=False, normalized=False) for t in text.SHOWN]
    tokenizer.add_tokens(hidden + shown)
    for token in (*text.HIDDEN, *text.SHOWN):
        ids[token] = tokenizer.token_to_id(token)
    return tokenizer.to_str(pretty=True), ids


# -------------------------------------------------------------------------------- the weights


def _layer_shapes(d: Dims, index: int, nextn: bool) -> dict[str, tuple[int, ...]]:
    """Names (after `model.layers.N.`) and shapes of one layer's weights, as Ling's files have."""
    p, shapes = d.heads * d.head_dim, {}
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (d.hidden,)
    a = "attention."
    if nextn or (index + 1) % d.group == 0:
        shapes[a + "q_proj.weight"] = (d.heads * (d.nope + d.rope), d.hidden)
        shapes[a + "kv_a_proj_with_mqa.weight"] = (d.kv_rank + d.rope, d.hidden)
        shapes[a + "kv_a_layernorm.weight"] = (d.kv_rank,)
        shapes[a + "kv_b_proj.weight"] = (d.heads * (d.nope + d.v_dim), d.kv_rank)
        shapes[a + "g_proj.weight"] = (d.heads, d.hidden)
        shapes[a + "dense.weight"] = (d.hidden, d.heads * d.v_dim)
    else:
        for name in "qkv":
            shapes[a + f"{name}_proj.weight"] = (p, d.hidden)
            shapes[a + f"{name}_conv1d.weight"] = (p, 1, d.conv)
        shapes[a + "b_proj.weight"] = (d.heads, d.hidden)
        shapes[a + "f_proj.weight"] = shapes[a + "g_proj.weight"] = (p, d.hidden)
        shapes[a + "A_log"], shapes[a + "dt_bias"] = (d.heads,), (p,)
        shapes[a + "o_norm.weight"], shapes[a + "o_proj.weight"] = (d.head_dim,), (d.hidden, p)
    if index == 0 and not nextn:
        widths = {"mlp.": d.mlp_width}
    else:
        shapes["mlp.gate.weight"], shapes["mlp.gate.expert_bias"] = (
            (d.experts, d.hidden),
            (d.experts,),
        )
        widths = {f"mlp.experts.{e}.": d.moe_width for e in range(d.experts)}
        widths["mlp.shared_experts."] = d.moe_width
    for prefix, width in widths.items():
        shapes[prefix + "gate_proj.weight"] = shapes[prefix + "up_proj.weight"] = (width, d.hidden)
        shapes[prefix + "down_proj.weight"] = (d.hidden, width)
    if nextn:
        for name in ("enorm", "hnorm", "final_layernorm"):
            shapes[name + ".weight"] = (d.hidden,)
        shapes["eh_proj.weight"] = (d.hidden, 2 * d.hidden)
    return shapes


_FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "gate.weight", "gate.expert_bias")


def _background(d: Dims, noise: _Noise, random: bool) -> dict[str, np.ndarray]:
    """All layers filled with noise: weak for the constructed model, full for the random one."""
    weights: dict[str, np.ndarray] = {}
    for index in range(d.layers + 1):
        for name, shape in _layer_shapes(d, index, nextn=index == d.layers).items():
            full = f"model.layers.{index}.{name}"
            if name.endswith("norm.weight"):
                value = np.ones(shape, np.float32)
            elif name.endswith(("A_log", "dt_bias")):
                scale = 0.0 if not random else 0.5 if name.endswith("A_log") else 1.0
                value = noise(full, *shape, scale=scale)
            elif name.endswith("expert_bias"):
                value = noise(full, *shape, scale=0.1 if random else 0.0)
            elif name.endswith("conv1d.weight"):
                value = noise(full, *shape, scale=0.3)
            elif name.endswith("gate.weight"):
                value = noise(full, *shape, scale=0.2 if random else 0.02)
            else:
                value = noise(full, *shape, scale=0.12 if random else 0.02)
            weights[full] = value
    weights["model.norm.weight"] = np.ones(d.hidden, np.float32)
    return weights


def _construct(
    d: Dims,
    weights: dict[str, np.ndarray],
    words: _Map,
    ids: dict[str, int],
    vocab: int,
    draft: float,
    noise: _Noise,
) -> None:
    """Write embedding, LM head, the facts' attention heads and NEXTN's projection.

    Columns of the residual stream: 0 is 1 for every token; 1 is 1 for words that no chain
    contains; then one column per fact that a token states, one per fact that attention found; the
    rest is the token's identity, entries of +-1 (words marked easy lean on the first half).
    """
    facts = _facts()
    states = {fact: 2 + number for number, fact in enumerate(facts)}
    found = {fact: 2 + len(facts) + number for number, fact in enumerate(facts)}
    reserved = 2 + 2 * len(facts)
    size = d.hidden - reserved
    if size < 96 or d.heads < 5:
        raise UsageError(
            f"The constructed tiny Ling needs a hidden size of at least {reserved + 96} and five "
            f"heads, got {d.hidden} and {d.heads}: use the default sizes or random=True."
        )
    columns = np.arange(size)

    embedding = np.zeros((vocab, d.hidden), np.float32)
    embedding[:, 0] = embedding[:, 1] = 1.0
    for token, number in ids.items():  # a stream for each token: a new word moves no other
        signs = noise(f"identity of {token!r}", size) >= 0
        embedding[number, reserved:] = np.where(signs, 1.0, -1.0)
    sources = {a for a, _ in words.edges} | {a for a, *_ in words.branches}
    for token in sources:
        embedding[ids[token], 1] = 0.0
    for token in words.easy:
        embedding[ids[token], reserved:] *= np.where(columns < size // 2, *_LEAN)
    for fact, (_, tokens) in facts.items():
        for token in tokens:
            embedding[ids[token], states[fact]] = 1.0
    weights["model.word_embeddings.weight"] = embedding

    # The LM head. A row reads the identities of the words it may follow; dividing by their square
    # norm makes the logit the gain itself, up to the final norm (about the root of the share of
    # columns that a token fills).
    rms = np.float32((size + 1) / d.hidden) ** np.float32(0.5)
    head = weights["lm_head.weight"]
    head[:, 0] = np.float32(_BACKGROUND)

    def follow(source: str, target: str, logit: float) -> None:
        identity = embedding[ids[source], reserved:]
        square = np.float32(float((identity * identity).sum()))
        head[ids[target], reserved:] += identity * (np.float32(logit) * rms / square)

    for (source, target), weight in words.edges.items():
        follow(source, target, _GAIN + weight)
        head[ids[target], 0] = 0.0
    for source, target, needs, base in words.branches:
        follow(source, target, _GAIN + base)
        head[ids[target], 0] = 0.0
        for fact, logit in needs.items():
            # Facts that attention found stand in the stream with value 2.
            head[ids[target], found[fact]] = np.float32(logit / 2) * rms
    head[ids[words.start], 1] = np.float32(_GAIN) * rms

    # Nothing but the facts' heads writes to the reserved columns.
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "dense.weight", "down_proj.weight")):
            value[:reserved] = 0.0

    # Facts: the query is constant; the key is large where a token states a fact of the head's
    # kind; the value says which. kv_a's norm makes a stated fact about sqrt(kv_rank) whatever the
    # rest holds, because the constant fills the latent vector otherwise.
    last = max(i for i in range(d.layers) if (i + 1) % d.group == 0)
    prefix = f"model.layers.{last}.attention."
    q = weights[prefix + "q_proj.weight"].reshape(d.heads, d.nope + d.rope, d.hidden)
    kv_a = weights[prefix + "kv_a_proj_with_mqa.weight"]
    kv_b = weights[prefix + "kv_b_proj.weight"].reshape(d.heads, d.nope + d.v_dim, d.kv_rank)
    gate, dense = weights[prefix + "g_proj.weight"], weights[prefix + "dense.weight"]
    kv_a[:] = 0.0
    kv_a[0, 0] = 1.0
    for head_number in range(5):
        q[head_number] = 0.0
        q[head_number, 0, 0] = 5.0
        kv_b[head_number] = 0.0
        gate[head_number] = 0.0
        gate[head_number, 0] = 5.0
    peak = np.float32(d.kv_rank) ** np.float32(0.5)
    for number, (fact, (head_number, _)) in enumerate(facts.items()):
        latent, value = 1 + number, number % d.v_dim
        kv_a[latent, states[fact]] = 4.0
        kv_b[head_number, 0, latent] = 4.0
        kv_b[head_number, d.nope + value, latent] = 2.0 / peak
        dense[found[fact], head_number * d.v_dim + value] = 1.0

    # NEXTN sees the newest token's embedding and the target's hidden state. It takes the identity
    # from the first and the facts from the second; the noise comes in by the second
    # half of the identity, so it misleads easy words less.
    mix = np.zeros((d.hidden, 2 * d.hidden), np.float32)
    diagonal = np.arange(d.hidden)
    mix[diagonal, diagonal] = 1.0
    for column in found.values():
        mix[column, d.hidden + column] = 1.0
    wrong = noise("draft", size, size - size // 2, scale=draft * _NOISE_GAIN / (size / 2) ** 0.5)
    mix[reserved:, reserved + size // 2 : d.hidden] += wrong
    weights[f"model.layers.{d.layers}.eh_proj.weight"] = mix


# ---------------------------------------------------------------------------------- the files


def _config(
    d: Dims, vocab: int, ids: dict[str, int], dtype: str, routed: Any, shared: Any
) -> dict[str, Any]:
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "torch_dtype": dtype,
        "vocab_size": vocab,
        "hidden_size": d.hidden,
        "intermediate_size": d.mlp_width,
        "num_hidden_layers": d.layers,
        "num_nextn_predict_layers": 1,
        "layer_group_size": d.group,
        "group_norm_size": 1,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.heads,
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "use_bias": False,
        "use_qkv_bias": False,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": d.context,
        "rope_theta": 600000.0,
        "rope_interleave": True,
        "eos_token_id": ids[text.END],
        "pad_token_id": ids[text.PAD],
        "full_attention_type": "mla",
        "q_lora_rank": None,
        "kv_lora_rank": d.kv_rank,
        "qk_nope_head_dim": d.nope,
        "qk_rope_head_dim": d.rope,
        "v_head_dim": d.v_dim,
        "use_mla_nope": False,
        "gated_attention_proj_granularity_type": "head_wise",
        "short_conv_kernel_size": d.conv,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "first_k_dense_replace": 1,
        "num_experts": d.experts,
        "num_experts_per_tok": d.top_k,
        "num_shared_experts": 1,
        "n_group": d.expert_groups,
        "topk_group": d.top_groups,
        "moe_intermediate_size": d.moe_width,
        "moe_shared_expert_intermediate_size": d.moe_width,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "routed_scaling_factor": 2.5,
        "expert_swiglu_limit_list": routed,
        "share_expert_swiglu_limit_list": shared,
    }


def _safetensors(weights: dict[str, np.ndarray], dtype: str) -> bytes:
    """A safetensors file's bytes: length of the header, header, data in the order of names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name in sorted(weights):
        value = weights[name]
        if dtype == "bfloat16" and not name.endswith(_FLOAT32):
            value, code = value.astype(ml_dtypes.bfloat16), "BF16"
        else:
            value, code = value.astype("<f4"), "F32"
        blob = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": code,
            "shape": list(value.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the data starts at a multiple of eight
    return len(head).to_bytes(8, "little") + head + b"".join(blobs)


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _files(
    seed: int, noise: float, random: bool, dtype: str, dims: Dims, routed: Any, shared: Any
) -> dict[str, bytes]:
    words = _Map()
    tokenizer, ids = _tokenizer(words.words)
    vocab = (max(ids.values()) + 64) // 64 * 64
    source = _Noise(seed)
    weights = _background(dims, source, random)
    weights["lm_head.weight"] = source(
        "lm_head", vocab, dims.hidden, scale=0.25 if random else 0.01
    )
    if random:
        identity = source("embedding", vocab, dims.hidden)
        weights["model.word_embeddings.weight"] = identity
    else:
        _construct(dims, weights, words, ids, vocab, noise, source)
    files = {
        "config.json": _dump(_config(dims, vocab, ids, dtype, routed, shared)),
        "generation_config.json": _dump(
            {
                "eos_token_id": ids[text.END],
                "pad_token_id": ids[text.PAD],
                "do_sample": True,
                "temperature": 0.6,
                "top_p": 0.95,
            }
        ),
        "tokenizer.json": tokenizer.encode(),
        "tokenizer_config.json": _dump(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": text.END,
                "pad_token": text.PAD,
                "model_max_length": dims.context,
                "clean_up_tokenization_spaces": False,
            }
        ),
        "chat_template.jinja": text.CHAT_TEMPLATE.encode(),
        "model.safetensors": _safetensors(weights, dtype),
    }
    return files


def _listed(limits: Sequence[float] | None, layers: int, name: str) -> list[float] | None:
    if limits is None:
        return None
    if len(limits) != layers:
        raise UsageError(
            f"{name} holds {len(limits)} limits but the model has {layers} layers: give one per "
            "layer, 0 for none."
        )
    return [float(limit) for limit in limits]


def _builder() -> str:
    """Which builder this is: a digest of its sources, so that a change of code rebuilds."""
    sources = (Path(__file__), Path(text.__file__))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def intact(dest: Path, settings: dict[str, Any] | None = None) -> bool:
    """Whether `dest` holds a checkpoint of ours, complete and unchanged (every file hashed).

    With `settings` it must also have been built from exactly those.
    """
    try:
        manifest = json.loads((dest / MANIFEST).read_text())
        if settings is not None and manifest["settings"] != settings:
            return False
        return bool(manifest["sha256"]) and all(
            hashlib.sha256((dest / name).read_bytes()).hexdigest() == digest
            for name, digest in manifest["sha256"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _ours(dest: Path) -> bool:
    """Whether a folder holds a tiny Ling, whole or not; other checkpoints have manifests as well."""
    try:
        return "settings" in json.loads((dest / MANIFEST).read_text())
    except ValueError:
        return True  # cut off while it was written
    except (OSError, TypeError):
        return False


def build(
    dest: Path | str,
    *,
    seed: int = 0,
    noise: float = 0.12,
    random: bool = False,
    dtype: str | None = None,
    dims: Dims | None = None,
    swiglu_limits: Sequence[float] | None = None,
    shared_swiglu_limits: Sequence[float] | None = None,
) -> Path:
    """Build a tiny Ling in `dest` unless exactly that one is there already; return the folder.

    `noise` sets how often NEXTN errs: 0 never (accept length 4 with three draft steps), 0.12 gives
    about 2.5. `random=True` builds random weights instead (float32 unless `dtype` says bfloat16);
    the constructed one is bfloat16. `swiglu_limits` and `shared_swiglu_limits` give one limit per
    layer, 0 for none, for the routed and the shared experts.

    The folder appears whole or not at all. Raises UsageError if `dest` holds anything that this
    function did not make, or if the sizes do not fit.
    """
    dest, dims = Path(dest), dims or Dims()
    dtype = dtype or ("float32" if random else "bfloat16")
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"A tiny Ling is float32 or bfloat16, not {dtype!r}.")
    if not 0 <= noise < 10:
        raise UsageError(f"noise is {noise}: give a number from 0 (NEXTN never errs) to 10.")
    if seed < 0:
        raise UsageError(f"seed is {seed}: give a whole number from 0.")
    routed = _listed(swiglu_limits, dims.layers, "swiglu_limits")
    shared = _listed(shared_swiglu_limits, dims.layers, "shared_swiglu_limits")
    settings = {
        "builder": _builder(),
        "seed": seed,
        "noise": noise,
        "random": random,
        "dtype": dtype,
        "dims": asdict(dims),
        "swiglu_limits": routed,
        "shared_swiglu_limits": shared,
    }
    if intact(dest, settings):
        return dest
    if dest.exists() and not dest.is_dir():
        raise UsageError(f"{dest} is not a folder: choose another place for the tiny Ling.")
    if dest.is_dir() and any(dest.iterdir()) and not _ours(dest):
        raise UsageError(
            f"{dest} holds files that are not a tiny Ling of ours: choose another folder, or empty "
            "this one yourself."
        )
    files = _files(seed, noise, random, dtype, dims, routed, shared)
    manifest = {
        "what": "a tiny Ling-3.0 built by Sparkling; not a trained model",
        "settings": settings,
        "sha256": {name: hashlib.sha256(blob).hexdigest() for name, blob in sorted(files.items())},
    }
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    except OSError as error:
        raise os_error(error, "making", dest) from error
    try:
        for name, blob in {**files, MANIFEST: _dump(manifest)}.items():
            (fresh / name).write_bytes(blob)
        fresh.chmod(0o755)
        _swap(fresh, dest, settings)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return dest


def _swap(fresh: Path, dest: Path, settings: dict[str, Any]) -> None:
    """Put the finished folder in place; if another process was faster, keep that one's."""
    for _ in range(3):
        try:
            os.rename(fresh, dest)  # replaces an empty folder, refuses a full one
            return
        except OSError:
            if intact(dest, settings):
                return
            old = Path(tempfile.mkdtemp(prefix=f".{dest.name}.old.", dir=dest.parent))
            try:
                os.rename(dest, old)
            except OSError:
                continue
            finally:
                shutil.rmtree(old, ignore_errors=True)
    raise UsageError(f"{dest} cannot be replaced: another process keeps writing to it.")
