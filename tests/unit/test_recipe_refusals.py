"""What a recipe may not say: every refusal, with its whole sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from sparkling.errors import UsageError
from sparkling.recipe import load

EDITION = """\
[editions.e]
title = "Another build"
build = "another"
requirements = "env/e.txt"
environment = ".venv-e"
switches = ["humming", "fp8-head", "nextn"]
"""

BASE = """\
schema = 1
name = "r"
title = "A recipe"
sglang = "0.5.23"
regime = "one"
model = "models/m"
served_name = "m"
ladder = ["baseline", "humming", "fp8-head", "nextn"]

[shared.flags]
tp-size = 1
context-length = 4096

[shared.env]
SGLANG_ENABLE_JIT_DEEPGEMM = "0"

[stages.baseline]
[stages.baseline.flags]
moe-runner-backend = "flashinfer_mxfp4"
enable-fp32-lm-head = true
[stages.baseline.expect.humming]
[stages.baseline.expect.fp8-head]
[stages.baseline.expect.nextn]

[stages.humming]
parent = "baseline"
switch = "humming"
[stages.humming.flags]
moe-runner-backend = "humming"

[stages.fp8-head]
parent = "humming"
switch = "fp8-head"
unset_flags = ["enable-fp32-lm-head"]
[stages.fp8-head.env]
SPARKLING_FP8_LM_HEAD = "1"

[stages.nextn]
parent = "fp8-head"
switch = "nextn"
[stages.nextn.flags]
speculative-algorithm = "NEXTN"
speculative-num-steps = 3
speculative-eagle-topk = 1
speculative-num-draft-tokens = 4

[variants.v]
title = "A variant"
why = "To have one."
[variants.v.flags]
page-size = 64

[why]
tp-size = "One GPU."
[noop]
page-size = "None."

[sizes]
shape_input = 2048
shape_output = 128
[timeouts]
ready_s = 60
"""


def refused(tmp_path: Path, text: str | bytes) -> str:
    """Return the sentence, without the file's name."""
    path = tmp_path / "env" / "recipes" / "r.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        load(path, root=tmp_path)
    said = str(caught.value)
    assert said.startswith("env/recipes/r.toml"), said
    assert said.endswith((".", "?")) and "\n" not in said
    return said.removeprefix("env/recipes/r.toml").lstrip(",: ")


def edit(*pairs: tuple[str, str]) -> str:
    text = BASE
    for old, new in pairs:
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
    return text


def test_the_base_is_good(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(BASE)
    book = load(path, root=tmp_path)
    assert book.model == tmp_path / "models" / "m"
    launch = book.render("nextn", model="/m", variant="v")
    assert launch.value("page-size") == "64" and all(launch.switches.values())


CASES = {
    # -- unknown keys, anywhere
    "top": (
        edit(('title = "A recipe"', 'title = "A recipe"\ntitel = "x"')),
        "top level, key titel: this key is unknown; did you mean title?",
    ),
    "shared": (
        edit(("[shared.env]", "[shared.envs]\nA = 1\n[shared.env]")),
        None,
    ),
    "stage": (
        edit(('switch = "humming"', 'switch = "humming"\ntittle = "x"')),
        "table [stages.humming], key tittle: this key is unknown; did you mean title?",
    ),
    "expect": (
        edit(("[stages.baseline.expect.humming]", "[stages.baseline.expect.humming]\nlogs = []")),
        "table [stages.baseline.expect.humming], key logs: this key is unknown; did you mean log?",
    ),
    "expect switch": (
        edit(("[stages.baseline.expect.nextn]", "[stages.baseline.expect.mtp]")),
        "table [stages.baseline.expect], key mtp: no such switch (switches: humming, fp8-head, "
        "nextn).",
    ),
    "variant": (
        edit(('why = "To have one."', 'why = "To have one."\nunset = []')),
        "table [variants.v], key unset: this key is unknown; did you mean unset_env?",
    ),
    "variant switch": (
        edit(("[variants.v.flags]", "[variants.v.with.fp8_head.flags]")),
        "table [variants.v.with], key fp8_head: no such switch (switches: humming, fp8-head, "
        "nextn); did you mean fp8-head?",
    ),
    "sizes": (
        edit(("shape_input = 2048", "shape_inputs = 2048")),
        "table [sizes], key shape_inputs: this key is unknown; did you mean shape_input?",
    ),
    "timeouts": (
        edit(("ready_s = 60", "ready = 60")),
        "table [timeouts], key ready: this key is unknown; did you mean ready_s?",
    ),
    "table": (
        BASE + "\n[published]\nx = 1\n",
        "top level, key published: this key is unknown",
    ),
    # -- missing and wrong types
    "missing": (
        edit(('regime = "one"\n', "")),
        "top level, key regime: it is missing and must be a string.",
    ),
    "type": (
        edit(('regime = "one"', "regime = 1")),
        "top level, key regime: must be a string, not 1.",
    ),
    "bool is no int": (
        edit(("schema = 1", "schema = true")),
        "top level, key schema: must be a whole number, not True.",
    ),
    "schema": (
        edit(("schema = 1", "schema = 2")),
        "top level, key schema: is 2; this library reads schema 1.",
    ),
    "empty": (
        edit(('title = "A recipe"', 'title = " "')),
        "top level, key title: must not be empty.",
    ),
    "stages": (
        'schema = 1\nsglang = "0.5.23"\nstages = 3\n',
        "top level, key stages: must be a table, not 3.",
    ),
    "stage type": (
        edit(("[variants.v]", "[stages]\nx = 1\n[variants.v]")),
        None,
    ),
    "list": (
        edit(('unset_flags = ["enable-fp32-lm-head"]', 'unset_flags = "enable-fp32-lm-head"')),
        "table [stages.fp8-head], key unset_flags: must be a list of strings, not "
        "'enable-fp32-lm-head'.",
    ),
    "twice in a list": (
        edit(('["baseline", "humming",', '["baseline", "baseline",')),
        "top level, key ladder: names baseline twice.",
    ),
    "size": (
        edit(("shape_output = 128", "shape_output = 0")),
        "table [sizes], key shape_output: must be at least 1, not 0.",
    ),
    "name": (
        edit(('name = "r"', 'name = "R 1"')),
        "top level, key name: the name 'R 1' must be lower-case words joined by dashes.",
    ),
    "served name": (
        edit(('served_name = "m"', 'served_name = "a:b"')),
        "top level, key served_name: SGLang refuses the name 'a:b'.",
    ),
    "version": (
        edit(('sglang = "0.5.23"', 'sglang = "0.4.9"')),
        "top level, key sglang: there is no flag list of SGLang 0.4.9 (lists: 0.5.23); write one "
        "with scripts/dump_flags.py.",
    ),
    "arguments": (
        edit(
            (
                "[stages.baseline.expect.humming]",
                "[stages.baseline.expect.humming]\narguments = { a = [1] }",
            )
        ),
        "table [stages.baseline.expect.humming], key arguments: a must be one value, not [1].",
    ),
    # -- flags
    "flag typo": (
        edit(("context-length = 4096", "context-lenght = 4096")),
        "table [shared.flags], key context-lenght: SGLang 0.5.23 has no such flag; did you mean "
        "context-length?",
    ),
    "flag underscores": (
        edit(("context-length = 4096", "context_length = 4096")),
        "table [shared.flags], key context_length: SGLang 0.5.23 has no such flag; did you mean "
        "context-length?",
    ),
    "flag dashes": (
        edit(("context-length = 4096", "--context-length = 4096")),
        "table [shared.flags], key --context-length: SGLang 0.5.23 has no such flag; write it "
        "without dashes: context-length.",
    ),
    "flag abbreviated": (
        edit(("context-length = 4096", "context-len = 4096")),
        "table [shared.flags], key context-len: SGLang 0.5.23 has no such flag; did you mean "
        "context-length?",
    ),
    "gone flag": (
        edit(("context-length = 4096", "cuda-graph-max-bs = 1")),
        "table [shared.flags], key cuda-graph-max-bs: SGLang 0.5.23 has no such flag; did you mean "
        "cuda-graph-max-bs-decode?",
    ),
    "alias twice": (
        edit(("tp-size = 1", "tp-size = 1\ntensor-parallel-size = 1")),
        "table [shared.flags], key tensor-parallel-size: is the same flag as tp-size, given twice.",
    ),
    "moe twice": (
        edit(
            (
                'moe-runner-backend = "humming"',
                'moe-runner-backend = "humming"\nmoe-runner-backend = "marlin"',
            )
        ),
        "broken TOML, the same key is given twice (at line 30, column 30).",
    ),
    "two moe backends": (
        edit(('moe-runner-backend = "humming"', 'moe-runner-backend = ["humming", "marlin"]')),
        "table [stages.humming.flags], key moe-runner-backend: takes one value, not the list "
        "['humming', 'marlin'].",
    ),
    "draft on another moe backend": (
        edit(
            (
                'speculative-algorithm = "NEXTN"',
                'speculative-algorithm = "NEXTN"\nspeculative-moe-runner-backend = "triton"',
            )
        ),
        "table [stages.nextn.flags], key speculative-moe-runner-backend: asks for a second MoE "
        "backend, triton beside humming; no proof could say which of them a layer runs.",
    ),
    "the clamp where no runner takes it": (
        edit(
            (
                'moe-runner-backend = "humming"',
                'moe-runner-backend = "deep_gemm"\n[stages.humming.env]\nSPARKLING_SWIGLU_CLAMP = "1"',
            ),
            ('switch = "humming"\n', ""),
        ),
        "table [stages.humming.env], key SPARKLING_SWIGLU_CLAMP: contradicts moe-runner-backend "
        "deep_gemm, which applies no SwiGLU limit: take one of humming, marlin, triton, "
        "flashinfer_mxfp4.",
    ),
    "the clamp is on or off": (
        edit(('SGLANG_ENABLE_JIT_DEEPGEMM = "0"', 'SPARKLING_SWIGLU_CLAMP = "yes"')),
        'table [shared.env], key SPARKLING_SWIGLU_CLAMP: is "1" or "0", not \'yes\'.',
    ),
    "choice": (
        edit(('moe-runner-backend = "humming"', 'moe-runner-backend = "huming"')),
        "table [stages.humming.flags], key moe-runner-backend: has no choice 'huming'; did you "
        "mean humming?",
    ),
    "int": (
        edit(("context-length = 4096", 'context-length = "4096"')),
        "table [shared.flags], key context-length: takes a whole number, not '4096'.",
    ),
    "bool for a value": (
        edit(("context-length = 4096", "context-length = true")),
        "table [shared.flags], key context-length: takes a whole number, not true.",
    ),
    "value for a switch": (
        edit(("enable-fp32-lm-head = true", "enable-fp32-lm-head = 1")),
        "table [stages.baseline.flags], key enable-fp32-lm-head: is a switch and takes true, not "
        "1.",
    ),
    "false": (
        edit(("enable-fp32-lm-head = true", "enable-fp32-lm-head = false")),
        "table [stages.baseline.flags], key enable-fp32-lm-head: is false; leave a switch out, or "
        "name it in unset_flags.",
    ),
    "dash value": (
        edit(("context-length = 4096", 'chat-template = "--x"')),
        "table [shared.flags], key chat-template: has the value '--x', which the command line "
        "would read as a flag.",
    ),
    "control character": (
        edit(("context-length = 4096", 'chat-template = "a\\nb"')),
        "table [shared.flags], key chat-template: has a control character in its value.",
    ),
    "empty list": (
        edit(("context-length = 4096", "cuda-graph-bs-decode = []")),
        "table [shared.flags], key cuda-graph-bs-decode: needs at least one value.",
    ),
    "placeholder": (
        edit(("context-length = 4096", 'chat-template = "{home}/x"')),
        "table [shared.flags], key chat-template: {home} is no placeholder; there are {model} and "
        "{cache}.",
    ),
    "tilde": (
        edit(("[shared.env]", '[shared.env]\nHUMMING_CACHE_DIR = "~/.humming/cache"')),
        "table [shared.env], key HUMMING_CACHE_DIR: ~ is not expanded by a program; use {cache} or "
        "a full path.",
    ),
    # -- what render alone decides, doors and secrets
    "host": (
        edit(("tp-size = 1", 'tp-size = 1\nhost = "0.0.0.0"')),
        "table [shared.flags], key host: the host is always loopback and given to render, so "
        "'0.0.0.0' has no place here.",
    ),
    "port": (
        edit(("tp-size = 1", "tp-size = 1\nport = 30000")),
        "table [shared.flags], key port: the port is given to render, so it has no place here.",
    ),
    "model path": (
        edit(("tp-size = 1", 'tp-size = 1\nmodel-path = "/m"')),
        "table [shared.flags], key model-path: the checkpoint is given to render, so it has no "
        "place here.",
    ),
    "config": (
        edit(("tp-size = 1", 'tp-size = 1\nconfig = "x.yaml"')),
        "table [shared.flags], key config: a second file would hide flags from the recipe's "
        "checks, so it has no place here.",
    ),
    "api key": (
        edit(("tp-size = 1", 'tp-size = 1\napi-key = "x"')),
        "table [shared.flags], key api-key: a recipe holds no secrets; the API key is given when "
        "the server starts.",
    ),
    "admin key": (
        edit(("tp-size = 1", 'tp-size = 1\nadmin-api-key = "x"')),
        "table [shared.flags], key admin-api-key: a recipe holds no secrets; the API key is given "
        "when the server starts.",
    ),
    "secret value": (
        edit(("tp-size = 1", 'tp-size = 1\nchat-template = "sk-ling-cookbook-test"')),
        "table [shared.flags], key chat-template: its value looks like a secret, and a recipe "
        "holds none.",
    ),
    "secret in json": (
        edit(
            (
                "tp-size = 1",
                'tp-size = 1\njson-model-override-args = { a = ["hf_abcdefghijkl"] }',
            )
        ),
        "table [shared.flags], key json-model-override-args: its value looks like a secret, and a "
        "recipe holds none.",
    ),
    "secret variable": (
        edit(("[shared.env]", '[shared.env]\nHF_TOKEN = "x"')),
        "table [shared.env], key HF_TOKEN: a recipe holds no secrets; export it in your own shell "
        "instead.",
    ),
    "secret variable value": (
        edit(("[shared.env]", '[shared.env]\nHF_ENDPOINT = "https://me:pass@hub.example"')),
        "table [shared.env], key HF_ENDPOINT: its value looks like a secret, and a recipe holds "
        "none.",
    ),
    # -- variables
    "unknown SGLANG variable": (
        edit(("SGLANG_ENABLE_JIT_DEEPGEMM", "SGLANG_ENABLE_JIT_DEEPGEM")),
        "table [shared.env], key SGLANG_ENABLE_JIT_DEEPGEM: SGLang 0.5.23 does not know this "
        "variable and would ignore it silently; did you mean SGLANG_ENABLE_JIT_DEEPGEMM?",
    ),
    "the fork's variable on stock SGLang": (
        edit(("SPARKLING_FP8_LM_HEAD", "SGLANG_ENABLE_FP8_LM_HEAD")),
        None,
    ),
    "unknown plugin variable": (
        edit(("SPARKLING_FP8_LM_HEAD", "SPARKLING_FP8_HEAD")),
        "table [stages.fp8-head.env], key SPARKLING_FP8_HEAD: the plugin has no such switch; did "
        "you mean SPARKLING_FP8_LM_HEAD?",
    ),
    "status file": (
        edit(("[shared.env]", '[shared.env]\nSPARKLING_STATUS_FILE = "x"')),
        "table [shared.env], key SPARKLING_STATUS_FILE: the place of the status file is chosen at "
        "each start.",
    ),
    "variable type": (
        edit(('SGLANG_ENABLE_JIT_DEEPGEMM = "0"', "SGLANG_ENABLE_JIT_DEEPGEMM = false")),
        "table [shared.env], key SGLANG_ENABLE_JIT_DEEPGEMM: must be a string or a whole number, "
        "not False.",
    ),
    "variable name": (
        edit(("[shared.env]", '[shared.env]\nomp = "1"')),
        "table [shared.env], key omp: a variable's name is upper-case letters, digits and _.",
    ),
    "switch variable": (
        edit(('SPARKLING_FP8_LM_HEAD = "1"', 'SPARKLING_FP8_LM_HEAD = "yes"')),
        'table [stages.fp8-head.env], key SPARKLING_FP8_LM_HEAD: is "1" or "0", not \'yes\'.',
    ),
    # -- contradictions
    "fp8 and fp32 head": (
        edit(('unset_flags = ["enable-fp32-lm-head"]\n', "")),
        "table [stages.fp8-head.env], key SPARKLING_FP8_LM_HEAD: contradicts enable-fp32-lm-head: "
        "the head is FP8 or FP32, so unset one of them.",
    ),
    "variant brings the fp32 head back": (
        edit(("[variants.v.flags]", "[variants.v.flags]\nenable-fp32-lm-head = true")),
        "table [stages.fp8-head.env], key SPARKLING_FP8_LM_HEAD: contradicts enable-fp32-lm-head: "
        "the head is FP8 or FP32, so unset one of them.",
    ),
    "two fp8 heads": (
        edit(
            (
                "[variants.v.flags]",
                '[editions.e.with.fp8-head.env]\nSGLANG_ENABLE_FP8_LM_HEAD = "1"\n'
                f"{EDITION}[variants.v.flags]",
            )
        ),
        "table [editions.e.with.fp8-head.env], key SGLANG_ENABLE_FP8_LM_HEAD: "
        "SPARKLING_FP8_LM_HEAD is on too, and one head cannot be quantized twice.",
    ),
    # -- editions
    "default edition": (
        edit(("ladder =", 'edition = "fork"\nladder =')),
        "top level, key edition: there is none called 'fork' in [editions].",
    ),
    "variant's edition": (
        edit(('why = "To have one."', 'why = "To have one."\nedition = "fork"')),
        "table [variants.v], key edition: there is none called 'fork' in [editions].",
    ),
    "edition's place": (
        edit(("[variants.v.flags]", EDITION.replace(".venv-e", "/v") + "[variants.v.flags]")),
        "table [editions.e], key environment: '/v' is not inside the repository.",
    ),
    "edition's switch": (
        edit(("[variants.v.flags]", EDITION.replace('"nextn"', '"nextm"') + "[variants.v.flags]")),
        "table [editions.e], key switches: no such switch (switches: humming, fp8-head, nextn); did "
        "you mean nextn?",
    ),
    "draft tokens": (
        edit(("speculative-num-draft-tokens = 4", "speculative-num-draft-tokens = 5")),
        "table [stages.nextn.flags], key speculative-num-draft-tokens: is 5, but a chain (top-k 1) "
        "of 3 steps has 4 draft tokens.",
    ),
    "draft tokens in a variant": (
        edit(
            (
                "page-size = 64",
                "page-size = 64\n[variants.v.with.nextn.flags]\nspeculative-num-steps = 2",
            )
        ),
        "table [stages.nextn.flags], key speculative-num-draft-tokens: is 4, but a chain (top-k 1) "
        "of 2 steps has 3 draft tokens.",
    ),
    "tree too small": (
        edit(
            ("speculative-eagle-topk = 1", "speculative-eagle-topk = 2"),
            ("speculative-num-draft-tokens = 4", "speculative-num-draft-tokens = 12"),
        ),
        "table [stages.nextn.flags], key speculative-num-draft-tokens: is 12, but 3 steps at top-k "
        "2 give 2 to 11 draft tokens.",
    ),
    "a number missing": (
        edit(("speculative-eagle-topk = 1\n", "")),
        "table [stages.nextn.flags], key speculative-algorithm: NEXTN needs all of its numbers, "
        "and speculative-eagle-topk is missing.",
    ),
    "all numbers missing": (
        edit(
            ("speculative-eagle-topk = 1\n", ""),
            ("speculative-num-steps = 3\n", ""),
            ("speculative-num-draft-tokens = 4\n", ""),
        ),
        "table [stages.nextn.flags], key speculative-algorithm: NEXTN needs all of its numbers, "
        "and speculative-num-steps, speculative-eagle-topk, speculative-num-draft-tokens is "
        "missing.",
    ),
    "zero steps": (
        edit(("speculative-num-steps = 3", "speculative-num-steps = 0")),
        "table [stages.nextn.flags], key speculative-num-steps: must be at least 1, not 0.",
    ),
    "no algorithm": (
        edit(('speculative-algorithm = "NEXTN"\n', "")),
        "table [stages.nextn.flags], key speculative-num-steps: is given without "
        "speculative-algorithm.",
    ),
    "algorithm typo": (
        edit(('speculative-algorithm = "NEXTN"', 'speculative-algorithm = "NEXTM"')),
        "table [stages.nextn.flags], key speculative-algorithm: 'NEXTM' is none of NEXTN, EAGLE, "
        "EAGLE3, STANDALONE, NGRAM, DFLASH, DSPARK, UNO; did you mean NEXTN?",
    ),
    "gpus": (
        edit(("tp-size = 1", "tp-size = 2")),
        "table [shared.flags], key tp-size: tp-size 2 × pp-size 1 needs 2 GPUs, but gpus says 1.",
    ),
    "gpus of a variant": (
        edit(('why = "To have one."', 'why = "To have one."\ngpus = 2')),
        "table [shared.flags], key tp-size: tp-size 1 × pp-size 1 needs 1 GPUs, but gpus says 2.",
    ),
    "expert parallel": (
        edit(("tp-size = 1", "tp-size = 1\nep-size = 2")),
        "table [shared.flags], key ep-size: 2 does not divide tp-size 1.",
    ),
    "context": (
        edit(("context-length = 4096", "context-length = 2048")),
        "table [shared.flags], key context-length: is 2048, but [sizes] asks for shape_input + "
        "shape_output = 2176 tokens.",
    ),
    # -- deltas, parents, ladder
    "unset what is not set": (
        edit(('unset_flags = ["enable-fp32-lm-head"]', 'unset_flags = ["enable-metrics"]')),
        "table [stages.fp8-head], key unset_flags: unsets enable-metrics, which is not set there.",
    ),
    "unset a typo": (
        edit(('unset_flags = ["enable-fp32-lm-head"]', 'unset_flags = ["enable-fp32-head"]')),
        "table [stages.fp8-head], key unset_flags: SGLang 0.5.23 has no flag enable-fp32-head; did "
        "you mean enable-fp32-lm-head?",
    ),
    "unset and set": (
        edit(
            (
                'unset_flags = ["enable-fp32-lm-head"]',
                'unset_flags = ["enable-fp32-lm-head"]\nflags = { enable-fp32-lm-head = true }',
            )
        ),
        "table [stages.fp8-head], key unset_flags: both sets and unsets enable-fp32-lm-head.",
    ),
    "unset a variable": (
        edit(
            (
                "page-size = 64",
                'page-size = 64\n[variants.w]\ntitle = "W"\nwhy = "."\nunset_env = ["X"]',
            )
        ),
        "table [variants.w], key unset_env: unsets X, which is not set there.",
    ),
    "set to what it is": (
        edit(("[stages.nextn.flags]", "[stages.nextn.flags]\ntp-size = 1")),
        "table [stages.nextn.flags], key tp-size: is what the parent has already.",
    ),
    "no such parent": (
        edit(('parent = "fp8-head"', 'parent = "fp8head"')),
        "table [stages.nextn], key parent: there is no 'fp8head' in [stages]; did you mean "
        "fp8-head?",
    ),
    "circle": (
        edit(("[stages.baseline]\n", '[stages.baseline]\nparent = "nextn"\n')),
        "table [stages.baseline], key parent: goes in a circle: baseline -> nextn -> fp8-head -> "
        "humming -> baseline.",
    ),
    "own parent": (
        edit(('parent = "baseline"', 'parent = "humming"')),
        "table [stages.humming], key parent: goes in a circle: humming -> humming.",
    ),
    "circle of variants": (
        edit(
            (
                'why = "To have one."',
                'why = "To have one."\nparent = "w"\n[variants.w]\ntitle = "W"\nwhy = "."\n'
                'parent = "v"',
            )
        ),
        "table [variants.v], key parent: goes in a circle: v -> w -> v.",
    ),
    "no ladder": (
        edit(('ladder = ["baseline", "humming", "fp8-head", "nextn"]', "ladder = []")),
        "top level, key ladder: must name at least one stage.",
    ),
    "rung typo": (
        edit(('"fp8-head", "nextn"]', '"fp8-head", "next"]')),
        "top level, key ladder: there is no stage 'next'; did you mean nextn?",
    ),
    "rungs out of order": (
        edit(('"humming", "fp8-head", "nextn"]', '"fp8-head", "humming", "nextn"]')),
        "top level, key ladder: stage fp8-head follows baseline, but its parent is humming; a rung "
        "is the one before it plus one switch.",
    ),
    "unavailable rung": (
        edit(
            (
                '[stages.nextn]\nparent = "fp8-head"\nswitch = "nextn"\n[stages.nextn.flags]\n'
                'speculative-algorithm = "NEXTN"\nspeculative-num-steps = 3\n'
                "speculative-eagle-topk = 1\nspeculative-num-draft-tokens = 4\n",
                '[stages.nextn]\nunavailable = "No draft layer."\n',
            )
        ),
        "top level, key ladder: stage nextn is unavailable: No draft layer.",
    ),
    "unavailable with flags": (
        edit(('switch = "nextn"', 'switch = "nextn"\nunavailable = "No."')),
        "table [stages.nextn], key parent: this key is unknown; known here: title, unavailable.",
    ),
    "switch not declared": (
        edit(('switch = "fp8-head"\n', "")),
        "table [stages.fp8-head], key switch: declares none, but its flags turn fp8-head on.",
    ),
    "switch declared but not set": (
        edit(("[stages.fp8-head.env]\n", ""), ('SPARKLING_FP8_LM_HEAD = "1"\n', "")),
        "table [stages.fp8-head], key switch: declares fp8-head, but its flags turn nothing on.",
    ),
    "two switches at once": (
        edit(
            (
                "[stages.humming.flags]",
                '[stages.humming.env]\nSPARKLING_FP8_LM_HEAD = "1"\n[stages.humming.flags]',
            ),
            ("enable-fp32-lm-head = true\n", ""),
            ('unset_flags = ["enable-fp32-lm-head"]\n', ""),
        ),
        "table [stages.humming], key switch: declares humming, but its flags turn fp8-head on, "
        "humming on.",
    ),
    "switch typo": (
        edit(('switch = "nextn"', 'switch = "mtp"')),
        "table [stages.nextn], key switch: 'mtp' is no switch (switches: humming, fp8-head, "
        "nextn).",
    ),
    "nothing expected": (
        edit(("[stages.baseline.expect.nextn]\n", "")),
        "table [stages], key baseline.expect: says nothing of nextn, and every switch is proved on "
        "or off.",
    ),
    "why of nothing": (
        edit(('tp-size = "One GPU."', 'pp-size = "One GPU."')),
        "table [why], key pp-size: no stage or variant uses it.",
    ),
    "why of a typo": (
        edit(('page-size = "None."', 'page-sizes = "None."')),
        "table [noop], key page-sizes: SGLang 0.5.23 has no such flag; did you mean page-size?",
    ),
    "why of an alias": (
        edit(('tp-size = "One GPU."', 'tensor-parallel-size = "One GPU."')),
        "table [why], key tensor-parallel-size: use the flag's first name, tp-size.",
    ),
    # -- no TOML at all
    "broken": (
        edit(('title = "A recipe"', 'title = "A recipe')),
        "broken TOML, Illegal character '\\n' (at line 3, column 18).",
    ),
    "table twice": (
        BASE + "\n[why]\n",
        "broken TOML, table [why] is given twice (at line 64, column 5).",
    ),
    "empty file": ("", "top level, key schema: it is missing and must be a whole number."),
    "not UTF-8": (
        BASE.encode().replace(b"A recipe", b"A r\xe9cipe"),
        "line 3 is not UTF-8, which TOML must be.",
    ),
    "UTF-16": (BASE.encode("utf-16"), "line 1 is not UTF-8, which TOML must be."),
    "too deep": ("a = " + "[" * 100_000, "broken TOML, nested too deeply."),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(tmp_path, name):
    text, expected = CASES[name]
    said = refused(tmp_path, text)
    if expected is None:
        return  # its own test below
    assert said == expected or (name == "table" and said.startswith(expected)), said


def test_an_unknown_key_beside_the_known_ones(tmp_path):
    said = refused(tmp_path, CASES["shared"][0])
    assert said == "table [shared], key envs: this key is unknown; did you mean env?"


def test_a_stage_that_is_no_table(tmp_path):
    text = BASE.replace("[stages.baseline]\n", "[stages]\nx = 1\n[stages.baseline]\n", 1)
    assert refused(tmp_path, text) == "table [stages], key x: must be a table, not 1."


def test_the_forks_variable_is_ignored_by_stock_sglang(tmp_path):
    said = refused(tmp_path, CASES["the fork's variable on stock SGLang"][0])
    assert said.startswith(
        "table [stages.fp8-head.env], key SGLANG_ENABLE_FP8_LM_HEAD: SGLang 0.5.23 does not know "
        "this variable and would ignore it silently"
    )


HEAD_AND = {
    "tp-size": ("tp-size = 2", "contradicts tp-size 2: the FP8 head works on one device."),
    "pp-size": ("pp-size = 2", "contradicts pp-size 2: the FP8 head works on one device."),
    "enable-lora": ("enable-lora = true", "cannot carry LoRA adapters"),
    "lora-paths": ('lora-paths = ["a"]', "cannot carry LoRA adapters"),
    "enable-multi-layer-eagle": ("enable-multi-layer-eagle = true", "without its scales"),
    "speculative-token-map": ('speculative-token-map = "m.pt"', "without their scales"),
    "startup-weight-load-mode": ('startup-weight-load-mode = "overlap"', "before the weights"),
    "weight-cache-mode": ('weight-cache-mode = "daemon"', "would keep the BF16 head"),
    "remote-instance-weight-loader-start-seed-via-transfer-engine": (
        "remote-instance-weight-loader-start-seed-via-transfer-engine = true",
        "which is gone",
    ),
    "rl-on-policy-target": ('rl-on-policy-target = "fsdp"', "that a trainer expects"),
}


@pytest.mark.parametrize("flag", HEAD_AND)
def test_what_the_fp8_head_cannot_go_with_is_refused_before_anything_starts(tmp_path, flag):
    line, why = HEAD_AND[flag]
    # Laid over every stage, with as many GPUs as it takes: only the head's stages refuse it.
    text = edit(("[variants.v.flags]\npage-size = 64", f"gpus = 2\n[variants.v.flags]\n{line}"))
    text = text.replace('[noop]\npage-size = "None."\n', "")
    if not flag.endswith("p-size"):
        text = text.replace("gpus = 2\n", "")
    if flag.startswith("speculative"):  # where there is speculation
        text = text.replace("[variants.v.flags]", "[variants.v.with.nextn.flags]")
    said = refused(tmp_path, text)
    assert said.startswith(
        f"table [stages.fp8-head.env], key SPARKLING_FP8_LM_HEAD: contradicts {flag}"
    )
    assert why in said
    # A value that forbids nothing, and a variant without the head, pass.
    for better in (
        text.replace("overlap", "serial").replace("daemon", "off"),
        text + '\n[variants.v.with.fp8-head]\nunset_env = ["SPARKLING_FP8_LM_HEAD"]\n',
    ):
        path = tmp_path / "better.toml"
        path.write_text(better)
        if better != text:
            assert load(path, root=tmp_path).render("nextn", model="/m", variant="v")


def test_every_rule_of_the_head_is_tried_here():
    from sparkling._rules import HEAD_FORBIDS

    assert {name for name, *_ in HEAD_FORBIDS} | {"tp-size", "pp-size"} == set(HEAD_AND)


# -- files ---------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError) as caught:
        load(tmp_path / "no.toml", root=tmp_path)
    assert str(caught.value) == "no.toml: there is no such file."


def test_a_directory(tmp_path):
    with pytest.raises(UsageError) as caught:
        load(tmp_path, root=tmp_path)
    assert str(caught.value).endswith(": this is a directory, not a TOML file.")


def test_a_file_without_permission(tmp_path, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    path = tmp_path / "r.toml"
    path.write_text(BASE)
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(UsageError) as caught:
        load(path, root=tmp_path)
    assert str(caught.value) == "r.toml: cannot be read (Permission denied)."


def test_a_file_elsewhere_is_named_in_full(tmp_path):
    path = tmp_path / "a" / "r.toml"
    path.parent.mkdir()
    path.write_text("x")
    with pytest.raises(UsageError) as caught:
        load(path, root=tmp_path / "b")
    assert str(caught.value).startswith(f"{path}: broken TOML")


# -- asking for what is not there ----------------------------------------------------------------


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "env" / "recipes" / "r.toml"
    path.parent.mkdir(parents=True)
    path.write_text(BASE)
    return load(path, root=tmp_path)


@pytest.mark.parametrize("call", ["stage", "available", "render"])
def test_an_unknown_stage(book, call):
    with pytest.raises(UsageError) as caught:
        if call == "render":
            book.render("nextm", model="/m")
        else:
            getattr(book, call)("nextm")
    assert str(caught.value) == (
        "env/recipes/r.toml has no stage 'nextm' (stages: baseline, humming, fp8-head, nextn); "
        "did you mean nextn?"
    )


def test_an_unknown_variant(book):
    with pytest.raises(UsageError) as caught:
        book.render("nextn", model="/m", variant="two-gpu")
    assert str(caught.value) == "env/recipes/r.toml has no variant 'two-gpu' (variants: v)."


def test_a_child_of_an_unavailable_stage_is_unavailable(tmp_path):
    text = edit(
        (
            '[stages.humming]\nparent = "baseline"\nswitch = "humming"\n[stages.humming.flags]\n'
            'moe-runner-backend = "humming"\n',
            '[stages.humming]\nunavailable = "No GPU."\n',
        ),
        ('["baseline", "humming", "fp8-head", "nextn"]', '["baseline"]'),
        ('tp-size = "One GPU."\n', ""),
    )
    path = tmp_path / "r.toml"
    path.write_text(text)
    book = load(path, root=tmp_path)
    assert book.available("nextn") == "No GPU." and book.available("baseline") is None
    with pytest.raises(UsageError, match=r"\[stages.nextn\]: not available here: No GPU\.$"):
        book.render("nextn", model="/m")


def test_an_alias_in_a_stage_replaces_the_parents_flag(tmp_path):
    text = edit(
        ('why = "To have one."', 'why = "To have one."\ngpus = 2'),
        ("page-size = 64", "page-size = 64\ntensor-parallel-size = 2"),
    )
    text += '\n[variants.v.with.fp8-head]\nunset_env = ["SPARKLING_FP8_LM_HEAD"]\n'
    path = tmp_path / "r.toml"
    path.write_text(text)
    launch = load(path, root=tmp_path).render("nextn", model="/m", variant="v")
    assert launch.value("tp-size") == "2" and launch.words("tensor-parallel-size") is None


def test_a_variant_is_laid_over_its_parent(tmp_path):
    text = edit(
        (
            "page-size = 64",
            'page-size = 64\n[variants.w]\ntitle = "W"\nwhy = "."\nparent = "v"\n'
            "[variants.w.flags]\npage-size = 32",
        )
    )
    path = tmp_path / "r.toml"
    path.write_text(text)
    book = load(path, root=tmp_path)
    assert book.render("nextn", model="/m", variant="w").value("page-size") == "32"
    assert book.render("nextn", model="/m", variant="v").value("page-size") == "64"


def test_a_tree_that_fits_is_allowed(tmp_path):
    text = edit(
        ("speculative-eagle-topk = 1", "speculative-eagle-topk = 2"),
        ("speculative-num-draft-tokens = 4", "speculative-num-draft-tokens = 11"),
    )
    path = tmp_path / "r.toml"
    path.write_text(text)
    assert load(path, root=tmp_path).render("nextn", model="/m").switches["nextn"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SGLANG_SIMULATE_ACC_TOKEN_MODE", "real-draft-token"),
        ("HF_HUB_OFFLINE", "1"),
        ("SGLANG_TEST_MAX_RETRY", "3"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ],
)
def test_words_that_only_look_like_secrets(tmp_path, key, value):
    path = tmp_path / "r.toml"
    path.write_text(edit(("[shared.env]", f'[shared.env]\n{key} = "{value}"')))
    assert load(path, root=tmp_path).render("baseline", model="/m").env[key] == value
