"""Which layouts the default tests leave to the slow ones."""

from layouts import covered, sizes_of
from wild.suite import COMBINED, LAYOUTS

SIZES = {layout.name: sizes_of(layout) for layout in LAYOUTS}


def test_stages_and_replicas_are_covered_where_both_are_combined():
    assert covered(SIZES) == {"pp2", "dp2"}
    assert covered({**SIZES, COMBINED.name: sizes_of(COMBINED)}) == set(SIZES)


def test_each_without_the_other_is_not_covered():
    assert not covered({name: SIZES[name] for name in ("pp2", "dp2")})
    assert not covered({name: SIZES[name] for name in ("dp2 x pp2", "pp2 x 2 stages")})
    assert not covered({"twice the same": (2, 1), "again": (2, 1)})
