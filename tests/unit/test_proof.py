"""The rules of proof, on matrices of what a server may say, write and answer."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest
from sparkling import log, recipe, recordings
from sparkling.errors import NotLive, UsageError
from sparkling.evidence import Probe
from sparkling.proof import Proof, judge, judge_all, prove_recorded, wanted

T = "[2026-11-29 18:15:18] "
LOADED = (
    T
    + "Load weight end. elapsed=1.89 s, type=BailingMoeV3ForCausalLM, avail mem=7.00 GB, mem usage=1.00 GB."
)
DRAFT = (
    T
    + "Load weight end. elapsed=0.02 s, type=BailingMoeForCausalLMNextN, avail mem=7.00 GB, mem usage=1.00 GB."
)
LAYERS = T + "attention type of layers:[0, 0, 0, 1], 0 is linear layer and 1 is softmax layer!"
HEAD = T + "Online FP8 quantization enabled for lm_head. bfloat16 -> float8_e4m3fn."
GEMM = T + "Using indexed gemm for humming moe"


def prepared(layer: int, backend: str = "DeepSeekV4 MXFP4 experts for Humming backend") -> str:
    return f"{T}Preparing {backend} (layer: model.layers.{layer}.experts)..."


def decode(length: float | None, rate: float = 0.49) -> str:
    spec = "" if length is None else f"accept len: {length:.2f}, accept rate: {rate:.2f}, "
    return (
        f"{T}Decode batch, #running-req: 1, #full token: 391, full token usage: 0.05, "
        f"mamba num: 2, mamba usage: 0.00, {spec}cpu graph: False, "
        "gen throughput (token/s): 83.69, #queue-req: 0"
    )


def info(**arguments):
    env = arguments.pop("env", None)
    return {
        "moe_runner_backend": "auto",
        "speculative_algorithm": None,
        "enable_fp32_lm_head": False,
        "process_env": env or {},
    } | arguments


ON = {"SPARKLING_FP8_LM_HEAD": "1"}
BF16 = {"dtype": "bfloat16", "bytes_before": 100, "bytes_after": 100}
FP8 = {"dtype": "float8_e4m3fn", "bytes_before": 100, "bytes_after": 52, "applied": 9}
SHARED = {"class": "BailingMoeForCausalLMNextN", "head_shared": True, "head_dtype": "float8_e4m3fn"}
PROBE = Probe(answered=True, tokens=128)
SPEC = Probe(
    answered=True,
    tokens=106,
    rounds=43,
    correct=62,
    proposed=129,
    reported_length=106 / 43,
    reported_rate=62 / 129,
)


def verdict(switch, expected, arguments, lines, status, probe, expect=None):
    events = None if lines is None else list(log.parse(lines))
    return judge(switch, expected, arguments, events, status, probe, expect)


GOOD = {
    ("humming", True): (
        info(moe_runner_backend="humming"),
        [LAYERS, prepared(2), prepared(3), LOADED, GEMM],
        {"head": BF16, "draft": None},
        PROBE,
    ),
    ("humming", False): (info(), [LOADED], {"head": BF16, "draft": None}, PROBE),
    ("fp8-head", True): (
        info(env=ON),
        [HEAD, LOADED],
        {"head": FP8},
        dataclasses.replace(PROBE, applied=(3, 131)),
    ),
    ("fp8-head", False): (
        info(),
        [LOADED],
        {"head": BF16},
        dataclasses.replace(PROBE, applied=(None, None)),
    ),
    ("nextn", True): (
        info(speculative_algorithm="EAGLE", speculative_num_steps=3),
        [LOADED, DRAFT, decode(2.44)],
        {"head": FP8, "draft": SHARED},
        SPEC,
    ),
    ("nextn", False): (info(), [LOADED, decode(None)], {"head": BF16, "draft": None}, PROBE),
}


@pytest.mark.parametrize(("switch", "expected"), list(GOOD))
def test_a_healthy_server_is_proved(switch, expected):
    got = verdict(switch, expected, *GOOD[switch, expected])
    assert got.state == ("live" if expected else "off")
    assert got.ok
    assert got.cause is None
    assert all(e.cause is e.remedy is None for e in got.evidence)
    assert len({e.place for e in got.evidence if e.ok}) >= 2


@pytest.mark.parametrize(("switch", "expected"), list(GOOD))
def test_declared_the_other_way_it_is_not_so(switch, expected):
    got = verdict(switch, not expected, *GOOD[switch, expected])
    assert got.state == ("not off" if expected else "not live")
    assert not got.ok
    assert got.cause
    assert got.remedy
    assert "\n" not in got.sentence


# -- every switch broken on purpose ---------------------------------------------------------------


def change(switch, **parts):
    """The healthy observation of a switch with some places replaced."""
    names = ("arguments", "lines", "status", "probe")
    return [parts.get(n, v) for n, v in zip(names, GOOD[switch, True], strict=True)]


BROKEN = {
    "humming: flag dropped": (
        "humming",
        {"arguments": info(), "lines": [LOADED]},
        "never reached it",
    ),
    "humming: wrong backend": (
        "humming",
        {"arguments": info(moe_runner_backend="marlin"), "lines": [LOADED]},
        "marlin",
    ),
    "humming: fell through silently": ("humming", {"lines": [LAYERS, LOADED]}, "without an error"),
    "humming: another backend prepared": (
        "humming",
        {"lines": [LAYERS, prepared(2), prepared(3, "MXFP4 experts for Marlin backend"), LOADED]},
        "another backend",
    ),
    "humming: a layer missing": (
        "humming",
        {"lines": [LAYERS, prepared(2), LOADED, GEMM]},
        "layer 3 was not",
    ),
    "humming: no answer": (
        "humming",
        {"probe": Probe(answered=False, note="refused")},
        "did not answer",
    ),
    "head: flag dropped": (
        "fp8-head",
        {"arguments": info(), "lines": [LOADED], "status": {"head": BF16}, "probe": PROBE},
        "never reached",
    ),
    "head: plugin absent": (
        "fp8-head",
        {"lines": [LOADED], "status": {}, "probe": PROBE},
        "plugin did not run",
    ),
    "head: left in BF16": (
        "fp8-head",
        {"lines": [LOADED], "status": {"head": BF16}, "probe": PROBE},
        "left in bfloat16",
    ),
    "head: with an FP32 head": (
        "fp8-head",
        {"arguments": info(env=ON, enable_fp32_lm_head=True)},
        "exclude each other",
    ),
    "head: not the one in use": (
        "fp8-head",
        {"probe": dataclasses.replace(PROBE, applied=(3, 3))},
        "did not run through it",
    ),
    "head: ignored by stock SGLang": (
        "fp8-head",
        {"lines": [LOADED], "status": None, "probe": PROBE},
        "without quantizing",
    ),
    "nextn: flag dropped": (
        "nextn",
        {"arguments": info(), "lines": [LOADED], "status": {"draft": None}, "probe": PROBE},
        "never reached",
    ),
    "nextn: draft disabled": ("nextn", {"lines": [LOADED], "status": {}}, "never loaded"),
    "nextn: head not shared": (
        "nextn",
        {"status": {"head": FP8, "draft": SHARED | {"head_shared": False}}},
        "head of its own",
    ),
    "nextn: the plugin's log says not shared": (
        "nextn",
        {
            "lines": [
                LOADED,
                DRAFT,
                T + "The NEXTN draft's lm_head is not the target's: it lacks the scales",
            ],
            "status": None,
        },
        "head of its own",
    ),
    "nextn: contributes nothing": (
        "nextn",
        {
            "lines": [LOADED, DRAFT, decode(1.0, 0.0)],
            "probe": dataclasses.replace(SPEC, tokens=256, rounds=255, correct=0),
        },
        "contributes nothing",
    ),
    "nextn: contributes nothing, by the log alone": (
        "nextn",
        {"lines": [LOADED, DRAFT, decode(1.0, 0.0)], "probe": PROBE},
        "contributes nothing",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_switch_is_not_live_and_says_why(name):
    switch, parts, why = BROKEN[name]
    got = verdict(switch, True, *change(switch, **parts))
    assert got.state == "not live"
    assert why in got.cause
    assert got.remedy
    proof = Proof("x", [got])
    assert not proof.ok
    with pytest.raises(NotLive) as caught:
        proof.require()
    said = str(caught.value)
    assert why in said
    assert switch in said
    assert "\n" not in said


def test_a_head_that_is_not_shared_is_named_with_the_trap():
    got = verdict(
        "nextn",
        True,
        *change(
            "nextn",
            lines=[LOADED, DRAFT],
            status={"head": FP8},
            probe=dataclasses.replace(SPEC, tokens=65, rounds=64, correct=0),
        ),
    )
    assert got.state == "not live"
    assert "without the scales" in got.cause


def test_256_tokens_in_255_rounds_are_not_a_contribution():
    # SGLang calls this 1.0039: it counts the token that prefill made.
    probe = Probe(answered=True, tokens=256, rounds=255, reported_length=256 / 255)
    assert probe.accept_length == 1.0
    got = verdict("nextn", True, *change("nextn", lines=[LOADED, DRAFT], probe=probe))
    assert got.state == "not live"


# -- missing keys are unknown ----------------------------------------------------------------------


@pytest.mark.parametrize("switch", ["humming", "fp8-head", "nextn"])
@pytest.mark.parametrize("expected", [True, False])
@pytest.mark.parametrize("nothing", [{}, None])
def test_nothing_known_is_cannot_tell(switch, expected, nothing):
    got = verdict(switch, expected, nothing, None, None, None)
    assert got.state == "cannot tell"
    got = verdict(switch, expected, nothing, [], None, Probe())
    assert got.state == "cannot tell"


@pytest.mark.parametrize("key", list(GOOD))
def test_two_places_prove_and_one_does_not(key):
    switch, expected = key
    healthy = GOOD[key]
    confirmed = {e.place for e in verdict(switch, expected, *healthy).evidence if e.ok}
    for keep in itertools.combinations(("arguments", "log", "probe"), 1):
        got = verdict(switch, expected, *only(healthy, keep))
        assert got.state == "cannot tell", keep
    for keep in itertools.combinations(("arguments", "log", "probe"), 2):
        got = verdict(switch, expected, *only(healthy, keep))
        proved = len(confirmed & set(keep)) == 2
        assert got.ok is proved, (keep, [(e.source, e.found, e.ok) for e in got.evidence])
        assert got.state != "not live"


def only(healthy, places):
    arguments, lines, status, probe = healthy
    return [
        arguments if "arguments" in places else None,
        lines if "log" in places else None,
        status if "log" in places else None,
        probe if "probe" in places else None,
    ]


def test_settings_and_a_loaded_draft_alone_do_not_prove_that_it_works():
    got = verdict("nextn", True, *change("nextn", lines=[LOADED, DRAFT], probe=PROBE))
    assert got.state == "cannot tell"
    assert "no speculation counters" in got.sentence


def test_few_rounds_say_nothing():
    probe = dataclasses.replace(SPEC, tokens=20, rounds=19, correct=0)
    got = verdict("nextn", True, *change("nextn", lines=[LOADED, DRAFT], probe=probe))
    assert got.state == "cannot tell"
    assert "19 rounds" in got.sentence


@pytest.mark.parametrize("expected", [True, False])
def test_an_environment_that_nobody_reported_is_unknown(expected):
    got = verdict("fp8-head", expected, {"moe_runner_backend": "auto"}, None, None, None)
    (asked,) = [e for e in got.evidence if e.source == "arguments"]
    assert asked.ok is None
    assert "could not be read" in asked.found


def test_twenty_rounds_are_enough():
    probe = dataclasses.replace(SPEC, tokens=21, rounds=20, correct=0)
    got = verdict("nextn", True, *change("nextn", lines=[LOADED, DRAFT], probe=probe))
    assert got.state == "not live"


@pytest.mark.parametrize(
    ("switch", "lines", "probe"),
    [
        ("nextn", [LOADED], SPEC),
        ("nextn", [LOADED, decode(2.44)], PROBE),
        ("fp8-head", [LOADED], dataclasses.replace(PROBE, applied=(3, 4))),
        ("humming", [LOADED, GEMM], PROBE),
    ],
)
def test_work_that_is_seen_overrules_settings_that_are_off(switch, lines, probe):
    got = verdict(switch, False, info(), lines, None, probe)
    assert got.state == "not off"


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("True", True), ("0", False), ("off", False)]
)
def test_the_switch_is_read_as_the_plugin_reads_it(value, on):
    arguments = info(env={"SPARKLING_FP8_LM_HEAD": value})
    got = verdict("fp8-head", True, *change("fp8-head", arguments=arguments))
    assert got.ok is on


def test_a_counter_that_stands_still_is_no_work():
    probe = dataclasses.replace(PROBE, applied=(3, 3))
    assert verdict("fp8-head", False, info(), [LOADED], None, probe).state == "off"


def test_the_draft_s_own_expert_layer_is_not_one_of_the_target_s():
    lines = [LAYERS, prepared(2), prepared(3), prepared(4), LOADED, DRAFT, GEMM]
    got = verdict("humming", True, *change("humming", lines=lines))
    assert got.state == "live"
    assert "3 layers, 2 to 3" in {e.found for e in got.evidence}


# -- the accept length, from sources that disagree (case 37) ---------------------------------------


def readings(got):
    return {(r.name, r.source): r for r in got.readings}


def test_log_4_reply_0_and_no_key():
    probe = Probe(answered=True, tokens=128, reported_length=0.0)
    got = verdict(
        "nextn", True, *change("nextn", lines=[LOADED, DRAFT, decode(4.0, 1.0)], probe=probe)
    )
    assert got.state == "live"  # the arguments and the log; the reply counted nothing
    seen = readings(got)
    assert seen["accept length", "log"].text == "4.00"
    assert seen["accept length", "reply's counters"].text == "unknown"
    assert seen["accept length", "/server_info"].text == "unknown"
    assert "impossible" in seen["accept length", "reply's own figure"].remark
    assert all(r.definition and r.window for r in got.readings)


def test_a_reply_of_0_alone_is_neither_off_nor_dead():
    probe = Probe(answered=True, tokens=128, reported_length=0.0)
    got = verdict("nextn", True, *change("nextn", lines=[LOADED, DRAFT], probe=probe))
    assert got.state == "cannot tell"
    assert (
        verdict("nextn", False, *change("nextn", lines=[LOADED], arguments=None, probe=probe)).state
        != "off"
    )


def test_106_tokens_in_43_rounds_beside_the_log():
    arguments = info(
        speculative_algorithm="EAGLE", internal_states=[{"avg_spec_accept_length": 2.4}]
    )
    got = verdict("nextn", True, *change("nextn", arguments=arguments))
    seen = readings(got)
    assert seen["accept length", "reply's own figure"].text == "2.47"  # counts prefill's token
    assert seen["accept length", "reply's counters"].text == "2.44"  # as the log counts
    assert seen["accept length", "log"].text == "2.44"
    assert seen["accept length", "/server_info"].text == "2.40"
    assert "106 tokens, 43 rounds" in seen["accept length", "reply's counters"].window
    assert len({r.definition for r in got.readings}) >= 4


def test_a_rate_stands_beside_a_length_with_its_own_definition():
    probe = dataclasses.replace(SPEC, reported_rate=0.29, reported_length=2.47)
    seen = readings(verdict("nextn", True, *change("nextn", probe=probe)))
    assert seen["accept rate", "reply's own figure"].text == "0.29"
    assert "proposed" in seen["accept rate", "reply's own figure"].definition


# -- the FP8 head against the BF16 head's log-probabilities ------------------------------------------


def with_top(top, ids=(7, 8), against=({"7": -0.5, "9": -2.0}, {"8": -0.1, "5": -3.0})):
    reference = {"top": list(against), "output_ids": [7, 8]}
    return dataclasses.replace(PROBE, applied=(3, 9), top=top, output_ids=ids, reference=reference)


@pytest.mark.parametrize(
    ("top", "state", "why"),
    [
        ([{"7": -0.51, "9": -1.98}, {"8": -0.1, "5": -3.1}], "live", None),
        ([{"7": -0.5, "9": -2.0}, {"8": -0.1, "5": -3.0}], "not live", "those of the BF16 head"),
        ([{"7": -4.5, "9": -0.1}, {"8": -5.1, "5": -0.2}], "not live", "scales are wrong"),
        ([{"1": -0.5}], "live", None),  # nothing comparable: the counter decides
    ],
)
def test_log_probabilities_differ_a_little(top, state, why):
    got = verdict("fp8-head", True, *change("fp8-head", probe=with_top(top)))
    assert got.state == state
    assert why is None or why in got.cause


def test_texts_are_compared_up_to_where_they_part():
    # The second position follows another token, so its log-probabilities cannot be compared.
    top = [{"7": -0.51, "9": -1.98}, {"8": -9.0, "5": -0.01}]
    got = verdict("fp8-head", True, *change("fp8-head", probe=with_top(top, ids=(9, 8))))
    assert got.state == "live"


@pytest.mark.parametrize("switch", ["humming", "fp8-head", "nextn"])
@pytest.mark.parametrize("status", [None, {}])
def test_every_switch_is_proved_on_the_fork_which_has_no_plugin(switch, status):
    fork = info(env={"SGLANG_ENABLE_FP8_LM_HEAD": "1"})
    changed = {"arguments": fork, "probe": PROBE} if switch == "fp8-head" else {}
    assert verdict(switch, True, *change(switch, status=status, **changed)).state == "live"


def test_the_fork_needs_no_plugin_but_its_line():
    fork = info(env={"SGLANG_ENABLE_FP8_LM_HEAD": "1"})
    got = verdict("fp8-head", True, *change("fp8-head", arguments=fork, status={}, probe=PROBE))
    assert got.state == "live"
    got = verdict("fp8-head", True, fork, [LOADED], {}, PROBE)
    assert got.state == "not live"
    assert "plugin did not run" in got.cause


# -- what the recipe declares ------------------------------------------------------------------------


def expect(root, stage, switch, book="tiny-ling"):
    return recipe.load(book, root=root).stage(stage).expect[switch]


def test_arguments_that_differ_from_the_recipe_are_told(root):
    want = expect(root, "nextn", "nextn")
    fits = info(
        speculative_algorithm="EAGLE",
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
    )
    assert verdict("nextn", True, *change("nextn", arguments=fits), want).state == "live"
    got = verdict(
        "nextn", True, *change("nextn", arguments=fits | {"speculative_num_steps": 5}), want
    )
    assert got.state == "not live"
    assert "speculative_num_steps = 5" in got.cause
    wrong = info(moe_runner_backend="marlin")
    want = expect(root, "baseline", "humming", "ling-3.0-flash")
    got = verdict("humming", False, wrong, [LOADED], None, PROBE, want)
    assert got.state == "not off"
    assert "marlin" in got.cause


@pytest.mark.parametrize("book", ["tiny-ling", "ling-3.0-flash"])
def test_every_stage_of_every_recipe_is_asked_for_evidence(root, book):
    data = recipe.load(book, root=root)
    for stage in data.ladder:
        launch = data.render(stage, model=root / "model")
        got = wanted(launch)
        assert {v.switch for v in got.verdicts} == set(launch.switches)
        assert all(v.evidence for v in got.verdicts)
        assert all(e.found == "" for v in got.verdicts for e in v.evidence)
        got.require()  # a list of wishes stops nobody


@pytest.mark.parametrize("book", ["tiny-ling", "ling-3.0-flash"])
def test_what_is_asked_beforehand_is_all_that_is_judged(root, book):
    """Every server of the matrices, and what differs most from it, judged both ways."""
    same = {"7": -0.5}
    probe = dataclasses.replace(
        SPEC, applied=(3, 9), top=[same], output_ids=[7], reference={"top": [same]}
    )
    draft_head = T + "The NEXTN draft uses the target's lm_head (by reference)."
    arguments, logs, states, probes = (list(x) for x in zip(*GOOD.values(), strict=True))
    arguments += [None, info(enable_fp32_lm_head=True, env=ON)]
    logs += [None, [LOADED, GEMM, HEAD, DRAFT, decode(1.0), draft_head, prepared(2)]]
    states += [None, {}, {"head": FP8, "draft": SHARED}]
    probes += [None, Probe(), probe]
    data = recipe.load(book, root=root)
    every = set()
    for stage in data.ladder:
        launch = data.render(stage, model=root / "model")
        listed = {
            (v.switch, v.expected_on, e.source, e.wanted)
            for v in wanted(launch).verdicts
            for e in v.evidence
        }
        asked, seen = data.stage(stage).expect, set()
        said = {n: x for e in asked.values() for n, x in e.arguments.items()}
        told = [info(**said), info(**dict.fromkeys(said, "other"))]
        for a, lines, status, p in itertools.product([*arguments, *told], logs, states, probes):
            events = None if lines is None else list(log.parse(lines))
            for got in judge_all(launch.switches, a, events, status, p, asked):
                seen |= {(got.switch, got.expected_on, e.source, e.wanted) for e in got.evidence}
        assert seen - listed == set()
        every |= {wish for *_, wish in seen}
    told = " | ".join(every)
    for wish in ("whole head", "target's head", "decode lines", "log-probabilities", "no draft"):
        assert wish in told  # the matrix reaches them


def test_one_line_is_one_line():
    got = verdict("fp8-head", True, *GOOD["fp8-head", True])
    assert "1 such line" in [e.found for e in got.evidence]
    got = verdict("fp8-head", False, *GOOD["fp8-head", False])
    assert "0 such lines" in [e.found for e in got.evidence]


# -- logs, recordings, storage -------------------------------------------------------------------------


def test_a_prompt_that_quotes_evidence_proves_nothing():
    quoted = [
        f"{T}Receive: obj=GenerateReqInput(text='{HEAD}'), sampling_params=...",
        f"text = {DRAFT}",
        f"{T}Finish: obj=... out={{'text': '{decode(4.0)}'}}",
    ]
    got = verdict("fp8-head", False, info(), [*quoted, LOADED], None, PROBE)
    assert got.state == "off"
    got = verdict("nextn", False, info(), [*quoted, LOADED], None, PROBE)
    assert got.state == "off"


def test_the_h200_recordings_say_what_is_known_of_them():
    assert {v.switch: v.state for v in prove_recorded("h200-humming").verdicts}["humming"] == "live"
    nextn = {v.switch: v for v in prove_recorded("h200-nextn").verdicts}["nextn"]
    assert nextn.state == "not live"  # dummy weights: nothing is accepted
    assert "contributes nothing" in nextn.cause
    cpu = {v.switch: v.state for v in prove_recorded("cpu-nextn").verdicts}
    assert cpu["nextn"] == "live"


@pytest.mark.parametrize("name", recordings.names())
def test_every_recording_is_labelled_and_raises_nothing(name):
    proof = prove_recorded(name)
    proof.require()
    assert set(recordings.LABEL) <= set(proof.label)
    text = str(proof)
    assert text.startswith("| RECORDING — not this machine")
    assert "RECORDING" in proof._repr_html_()
    raw = json.dumps(recordings.load(name))
    for private in ("/root", "/opt/", "/work", "/home", "api_key"):
        assert private not in raw


def test_an_unknown_recording_is_one_sentence():
    with pytest.raises(UsageError, match="did you mean 'h200-humming'"):
        prove_recorded("h200-huming")


def test_a_proof_survives_its_file(tmp_path):
    verdicts = judge_all(
        {"humming": False, "nextn": True},
        *GOOD["nextn", True][:1],
        list(log.parse(GOOD["nextn", True][1])),
        *GOOD["nextn", True][2:],
    )
    proof = Proof("nextn", verdicts, dataclasses.replace(SPEC, top=[{"1": -0.5}]), made="now")
    again = Proof.from_json(json.loads(json.dumps(proof.to_json())))
    assert again.to_json() == proof.to_json()
    assert again.ok is proof.ok is True
    assert str(again) == str(proof)


def test_the_first_contradiction_is_told_before_the_unknown():
    bad = verdict("nextn", True, *change("nextn", lines=[LOADED]))
    unknown = verdict("humming", True, None, None, None, None)
    with pytest.raises(
        NotLive, match=r"^Switch 'nextn' is not live: .* Also: humming \(cannot tell\)"
    ):
        Proof("x", [unknown, bad]).require()
    with pytest.raises(NotLive, match="declares no switch"):
        Proof("x", []).require()


# -- the trap --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "state"), [(4, "not live"), (30, "not live"), (50, "live")])
def test_a_draft_below_any_round_s_price_is_not_live(kept, state):
    # 1.03, 1.25 and 1.41: a broken draft hits now and then, and no round costs less than 1.6 steps.
    probe = dataclasses.replace(SPEC, tokens=122 + kept, rounds=121, correct=kept, proposed=363)
    got = verdict("nextn", True, *change("nextn", lines=[LOADED, DRAFT], probe=probe))
    assert got.state == state
    (seen,) = [e for e in got.evidence if e.source == "probe"]
    assert re.search(rf"{1 + kept / 121:.2f} \[\d\.\d\d, \d\.\d\d\] over 121 rounds", seen.found)


def test_the_trap_is_called_by_its_name():
    status = {
        "head": FP8,
        "draft": {
            "class": "BailingMoeForCausalLMNextN",
            "head_shared": False,
            "head_dtype": "float8_e4m3fn",
            "trap": "tensor-only",
        },
    }
    probe = dataclasses.replace(SPEC, tokens=128, rounds=124, correct=3, proposed=372)
    lines = [LOADED, DRAFT, decode(1.02)]
    got = verdict("nextn", True, *change("nextn", lines=lines, status=status, probe=probe))
    assert got.state == "not live"
    assert got.sentence.startswith("switch 'nextn' is not live: the draft contributes nothing")
    assert "SPARKLING_TRAP=tensor-only" in got.sentence and "variant" in got.remedy
    (told,) = [e for e in got.evidence if e.source == "status" and e.ok is False]
    assert "head not shared" in told.found and "SPARKLING_TRAP=tensor-only" in told.found


def test_accept_bounds_hold_the_value_and_shrink_with_rounds():
    from sparkling.wanted_draft import accept_bounds

    low, high = accept_bounds(2.5, 40)
    assert 2.0 < low < 2.5 < high < 3.0
    narrower = accept_bounds(2.5, 4000)
    assert low < narrower[0] < 2.5 < narrower[1] < high
    assert accept_bounds(1.0, 64)[0] == 1.0 and accept_bounds(4.0, 64)[1] == 4.0
    assert accept_bounds(1.0, 124)[1] < 1.3  # a useless draft's probe of 128 tokens decides


def test_hummings_kernels_are_told_and_prove_it_only_where_some_were_asked_for():
    given = list(change("humming"))

    def told(on: bool, **counts):
        status = {"humming": {"compiled": 0, "cached": 0, "compile_s": 0.0, **counts}}
        found = verdict("humming", on, *given[:2], status, *given[3:])
        return [
            (e.found, e.ok) for e in found.evidence if "ernel" in e.wanted and e.source == "status"
        ]

    assert told(True, compiled=3, cached=40, compile_s=9.04) == [
        ("3 compiled in 9.0 s, 40 from the cache", True)
    ]
    assert told(True) == [("0 compiled in 0.0 s, 0 from the cache", None)]
    assert told(False, cached=2) == [("0 compiled in 0.0 s, 2 from the cache", False)]
    assert told(False) == []


def test_the_heads_kernel_is_told_beside_its_bytes():
    head = {"dtype": "float8_e4m3fn", "bytes_before": 805e6, "bytes_after": 403e6}
    for kernel, end in (
        ("sparkling-cuda", "403.00 MB, kernel sparkling-cuda"),
        (None, "403.00 MB"),
    ):
        status = {"head": {**head, "kernel": kernel}, "draft": None}
        found = verdict("fp8-head", True, *change("fp8-head", status=status)).evidence
        (told,) = (e.found for e in found if e.wanted == "head dtype float8_e4m3fn")
        assert told.endswith(end)
