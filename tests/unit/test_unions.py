"""Unions of experts: counted on made-up and on recorded routings, beside the formula."""

from __future__ import annotations

import numpy as np
import pytest
from sparkling import canvas, inventory, show_cost, traffic, unions
from sparkling.errors import UsageError


def routing(experts, text=None):
    experts = np.asarray(experts, np.uint8)
    text = np.zeros(len(experts), np.int16) if text is None else np.asarray(text)
    return unions.Routing("answers", experts, text, "made for a test")


def test_windows_by_hand():
    one = routing([[[0, 1]], [[1, 2]], [[1, 2]], [[5, 6]]])
    found = unions.counted(one, (1, 2, 3))
    assert found[1].value == 2
    assert found[2].value == pytest.approx((3 + 2 + 4) / 3)
    assert found[3].value == pytest.approx((3 + 4) / 2)
    assert found[1].n == 1 and found[1].low is None  # one text gives no interval


def test_windows_do_not_cross_texts():
    two = routing([[[0, 1]], [[2, 3]], [[4, 5]], [[4, 5]]], [0, 0, 1, 1])
    assert unions.counted(two, (2,))[2].value == pytest.approx((4 + 2) / 2)
    with pytest.raises(UsageError, match="No recorded text has 3 positions"):
        unions.counted(two, (3,))


def test_independent_choices_give_the_formula():
    rng = np.random.default_rng(7)
    drawn = np.argsort(rng.random((4000, 2, 32)), axis=2)[:, :, :4]
    found = unions.counted(routing(drawn, np.repeat(np.arange(8), 500)), (1, 2, 4, 8))
    for k, one in found.items():
        assert one.value == pytest.approx(traffic.union(k, experts=32, top_k=4), rel=0.01)


def test_the_recorded_texts(root):
    """Text chooses more alike than independent positions would, repeated text most of all."""
    shape = inventory.inventory(root / "models" / "sparklet").known()
    by_kind = {one.kind: unions.counted(one) for one in unions.read()}
    assert set(by_kind) == {"answers", "repeated"}
    for kind, found in by_kind.items():
        assert found[1].value == shape.top_k, kind
        assert found[4].n >= 20
        expected = traffic.union(4, experts=shape.experts, top_k=shape.top_k)
        assert found[4].high < expected
    assert "Sparklet" in unions.read()[0].label


def test_the_picture(root):
    view = show_cost.unions_picture(inventory.inventory(root / "models" / "sparklet"))
    assert view.png.startswith(b"\x89PNG") and len(view.png) <= canvas.MAX_BYTES
    assert "repeated text, greedy" in str(view) and "(n=24)" in str(view)


def test_a_recording_that_is_none(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(UsageError, match="no recorded routing"):
        unions.read(tmp_path / "x.npz")
