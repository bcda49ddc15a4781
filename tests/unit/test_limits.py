"""What proof says of the SwiGLU limits that the plugin's status file reports, layer by layer."""

from __future__ import annotations

import json

import pytest
from sparkling import limits, show
from sparkling.errors import NotLive
from sparkling.evidence import Evidence
from sparkling.limits import Limit
from sparkling.proof import Proof, Verdict


def entry(wanted, applied, by=None, runner="humming"):
    return {"wanted": wanted, "applied": applied, "by": by, "runner": runner}


def ling(applied, by=None, runner="humming"):
    """The status of Ling-3.0-flash: 40 MoE layers and the NEXTN layer, 42."""
    routed = {
        str(n): entry(*((4.0, applied, by) if 35 <= n < 42 else (None, None)), runner=runner)
        for n in range(2, 43)
    }
    shared = {
        str(n): entry(want, want, "sglang" if want else None, "BailingMLP")
        for n in range(2, 43)
        for want in [5.0 if 34 <= n < 40 else 7.0 if 40 <= n < 42 else None]
    }
    return {"moe": {"limits": routed, "shared_limits": shared}}


def test_a_status_without_limits_says_nothing():
    for status in (None, {}, {"moe": None}, {"moe": {}}, {"moe": {"routed_scaling": {"1": 2.5}}}):
        assert limits.read(status) is None


def test_layers_of_one_kind_are_one_row():
    found = limits.read(ling(4.0, "sparkling"))
    assert len(found) == 82 and all(one.ok for one in found) and limits.problem(found) is None
    rows = [(span, one.experts, one.applied) for span, one in limits.spans(found)]
    assert rows == [
        ("2–34", "routed", None),
        ("35–41", "routed", 4.0),
        ("42", "routed", None),
        ("2–33", "shared", None),
        ("34–39", "shared", 5.0),
        ("40–41", "shared", 7.0),
        ("42", "shared", None),
    ]


def test_a_dropped_limit_is_named_with_its_layers_and_its_runner():
    found = limits.read(ling(None, runner="marlin"))
    assert [one.layer for one in found if not one.ok] == list(range(35, 42))
    said = "the routed experts of layers 35–41 want 4 and marlin applies none"
    assert limits.problem(found) == said
    # Neighbours only: layers apart are not called a range.
    apart = [Limit(n, "shared", 5.0, None, None, "fused") for n in (34, 36)]
    assert [span for span, _ in limits.spans(apart)] == ["34", "36"]
    assert "of layer 34 want 5 and fused applies none" in limits.problem(apart)


def test_what_a_layer_was_seen_to_use_counts_more_than_what_it_was_built_with():
    status = {"moe": {"limits": {"3": entry(0.4, 0.4)}, "swiglu_limits": {"3": None}}}
    assert limits.read(status) == [Limit(3, "routed", 0.4, None, None, "humming")]
    status["moe"]["swiglu_limits"] = {"3": 0.4}
    assert limits.read(status)[0].ok


def proof(status, clamp: bool) -> Proof:
    good = Verdict("humming", True, "live", [Evidence("humming", "log", "a", "b", True)])
    return Proof("humming", [good], limits=limits.read(status), clamp=clamp)


def test_a_limit_that_was_asked_for_and_dropped_is_no_proof():
    good = proof(ling(4.0, "sparkling"), clamp=True)
    assert good.ok and good.unlimited is None
    good.require()
    dropped = proof(ling(None), clamp=True)
    assert not dropped.ok
    with pytest.raises(NotLive, match=r"^SPARKLING_SWIGLU_CLAMP=1 is not at work: the routed ex.+"):
        dropped.require()
    silent = proof(None, clamp=True)
    assert not silent.ok
    with pytest.raises(NotLive, match="the plugin says nothing about the SwiGLU limits"):
        silent.require()


def test_stock_sglang_is_reported_and_not_condemned():
    stock = proof(ling(None, runner="marlin"), clamp=False)
    assert stock.ok and proof(None, clamp=False).ok
    text = str(show.proof(stock))
    assert "35–41" in text and "✗" in text and "(marlin)" in text


def test_a_switch_that_fails_is_told_before_the_limits():
    broken = proof(ling(None), clamp=True)
    broken.verdicts = [Verdict("humming", True, "not live", [], "it fell back", "look")]
    with pytest.raises(NotLive, match="it fell back"):
        broken.require()


def test_the_table_shows_every_layer_and_survives_the_run_folder():
    one = proof(ling(4.0, "sparkling"), clamp=True)
    again = Proof.from_json(json.loads(json.dumps(one.to_json())))
    assert again.limits == one.limits and again.clamp and again.ok
    text = str(show.proof(again))
    assert "sparkling (humming)" in text and "sglang (BailingMLP)" in text and "✗" not in text
    # A model without a limit gets no table.
    status = {"moe": {"limits": {"1": entry(None, None)}, "shared_limits": {}}}
    assert "SwiGLU" not in str(show.proof(proof(status, clamp=False)))
    assert "is not at work" in str(show.proof(proof(None, clamp=True)))
    # A proof of before these fields existed can still be read.
    old = one.to_json()
    del old["limits"], old["clamp"]
    assert Proof.from_json(old).limits is None
