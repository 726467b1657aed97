"""A pytest hook: with PYPCD_TEST_REPORT=FILE the result of each test is appended to FILE as soon as it is known, as a
line of JSON with the values that the test passed to record_property. Knows nothing of the tests."""

from __future__ import annotations

import json
import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = os.environ.get("PYPCD_TEST_REPORT")
    if file and (report.when == "call" or not report.passed):
        why = report.longreprtext if report.failed else ""
        result = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2), "why": why}
        with open(file, "a") as out:
            out.write(json.dumps({**result, **dict(report.user_properties)}) + "\n")
