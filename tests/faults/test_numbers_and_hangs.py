"""Inputs that gave wrong numbers or hung, and variants of them, equal the plain Trainer under every layout."""

from faults.layouts import Case, Regression, check, each

CASES = {"plain": Case(Regression, saves=True, validates=True, epochs=2)}


@each(CASES, {})
def test_equals_one_process(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path)
