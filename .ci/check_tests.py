"""Did the tests run? A run in which most are skipped, deselected or not collected passes too.

    python .ci/check_tests.py results.xml      # pytest's --junitxml

Exits 1 if fewer tests passed than the floor, or none of a kind that must run. Says which kinds were left out, and why.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

# Somewhat below what passes today: raise it as tests are added.
FLOOR = 7500
# Part of a test's module -> whether a run without any of them is an error.
KINDS = {"test_kernels_cpu": True, "test_kernels_attention": True, "test_kernels_fused": True, "sanitized": False}


def problems(cases: Sequence[ElementTree.Element], floor: int) -> tuple[list[str], list[str]]:
    """(errors, notes) for the test cases of a run."""
    passed = [case for case in cases if not {child.tag for child in case} & {"skipped", "failure", "error"}]
    errors = [] if len(passed) >= floor else [f"{len(passed)} tests passed, at least {floor} must"]
    notes = []
    for kind, must in KINDS.items():
        if any(kind in case.get("classname", "") for case in passed):
            continue
        skips = [case.find("skipped") for case in cases if kind in case.get("classname", "")]
        reasons = sorted({skip.get("message", "") for skip in skips if skip is not None}) or ["there are none"]
        (errors if must else notes).append(f"no test of {kind} ran: {'; '.join(reasons)}")
    return errors, notes


def main(arguments: Sequence[str]) -> int:
    (path,) = arguments
    errors, notes = problems(list(ElementTree.parse(path).iter("testcase")), FLOOR)
    for line in (*notes, *errors):
        print(line)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
