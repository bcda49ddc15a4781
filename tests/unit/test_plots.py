"""The distribution as a picture: small, its n named, not drawn from nothing."""

from __future__ import annotations

import numpy as np
from sparkling import canvas, plots


def test_ecdf_is_a_small_picture_that_names_its_n():
    values = np.random.default_rng(0).lognormal(0, 1, 20_000).tolist()
    view = plots.ecdf(
        {"baseline": values, "nextn": [1.0, None, 2.0], "none": [None]},
        label="time of a reply", unit="seconds", title="All of it", where="here",
    )  # fmt: skip
    assert view.png.startswith(b"\x89PNG") and len(view.png) <= canvas.MAX_BYTES
    assert view.text == "All of it: time of a reply by arm, baseline n=20000, nextn n=2"
    assert plots.ecdf({"x": [None]}, label="", unit="", title="") is None


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    values, share = plots._thin(list(range(100_001)), [i / 100_000 for i in range(100_001)])
    assert len(values) == len(share) < 1600
    assert (values[0], values[-1], share[-1]) == (0, 100_000, 1.0)
