"""Which layouts the default tests leave to the slow ones."""

from harness.layouts import covered, each_under, sizes_of
from harness.verification import COMBINED, LAYOUTS

SIZES = {layout.name: sizes_of(layout) for layout in LAYOUTS}


def test_combined_layout_covers_stages_and_replicas():
    assert covered(SIZES) == {"pp2", "dp2", "dp2 x zero3"}
    assert covered({**SIZES, COMBINED.name: sizes_of(COMBINED)}) == set(SIZES)


def test_stages_or_replicas_alone_do_not_cover_the_combination():
    assert not covered({name: SIZES[name] for name in ("pp2", "dp2")})
    assert not covered({name: SIZES[name] for name in ("dp2 x pp2", "pp2 x 2 stages")})
    assert not covered({"twice the same": (2, 1), "again": (2, 1)})


def by_default(mark):
    return [param.id for param in mark.args[1] if not param.marks]


def test_first_module_runs_over_replicas_and_others_over_stages():
    mark = each_under("module", ["a", "b"], [*LAYOUTS, COMBINED])
    assert by_default(mark) == [f"a-{COMBINED.name}", "b-pp2 x 2 stages"]
    assert len(mark.args[1]) == 2 * (len(LAYOUTS) + 1), "the slow tests run the others"
    mark = each_under("module", ["a", "b"], [*LAYOUTS, COMBINED], replicated=["b"])
    assert by_default(mark) == ["a-pp2 x 2 stages", f"b-{COMBINED.name}"]
    assert by_default(each_under("module", ["a", "b"], LAYOUTS[1:2])) == ["a-dp2", "b-dp2"], "none is without replicas"
