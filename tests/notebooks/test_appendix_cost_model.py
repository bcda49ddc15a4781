"""The appendix on costs runs by itself, in seconds, without a server, on every lane."""

from __future__ import annotations

import pytest
from sparkling import suite


@pytest.mark.parametrize("kind", ["cpu", "spark"])
def test_it_runs_without_a_server(kind, shown):
    text, pictures = shown("appendix_cost_model", kind)
    assert pictures == 5
    for words in ("70.42 GB", "The published figures, reconciled", "FP8 heads against", "stated"):
        assert words in text
    assert "No run on this machine holds measurements yet" in text


def test_the_whole_suite_includes_it(root):
    names = [path.stem for path in suite.ordered(root / "notebooks")]
    assert names[0] == "00_start_here" and "appendix_cost_model" in names
    assert names.index("90_serve") < names.index("appendix_cost_model")
