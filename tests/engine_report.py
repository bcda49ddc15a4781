"""A pytest plugin for `test_engine.py`: one JSON line for each test that is over."""

from __future__ import annotations

import json
import os

_bad: dict[str, tuple[str, str]] = {}


def pytest_runtest_logreport(report) -> None:
    if report.skipped:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if hasattr(report, "wasxfail"):
            text = f"expected to fail: {report.wasxfail}"
        _bad.setdefault(report.nodeid, ("skipped", text))
    elif report.failed:
        sections = [f"-- {title} --\n{text}" for title, text in report.sections]
        whole = "\n".join([f"[{report.when}] {report.longreprtext}", *sections])
        _bad[report.nodeid] = ("failed", whole)
    if report.when == "teardown":
        outcome, text = _bad.pop(report.nodeid, ("passed", ""))
        with open(os.environ["ENGINE_REPORT"], "a") as file:
            file.write(json.dumps({"id": report.nodeid, "outcome": outcome, "text": text}) + "\n")
