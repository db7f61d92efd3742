"""Numbers and tables as they are printed."""

import pytest

from lightning_hybrid.text import columns, contrasted, counted, sized, spanned, spanned_within, timed, wrapped


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (contrasted(2 / 3, 0.5), ("0.666667", "0.5")),
        (contrasted(4.187321, 4.187322), ("4.187321", "4.187322")),
        (contrasted(1.0, 1.0 + 2**-52), ("1", "1.0000000000000002")),
        (contrasted(4.1873212, 4.1873212), ("4.18732", "4.18732")),
        (sized(0), "0 B"),
        (sized(999.4), "999 B"),
        (sized(999_500), "1 MB"),
        (sized(72.06e6), "72.1 MB"),
        (sized(3.2e15), "3.2 PB"),
        (timed(0.0), "0 ms"),
        (timed(0.0123), "12.3 ms"),
        (timed(2.5e-5), "25 µs"),
        (timed(12_345.0), "12,345 s"),
        (timed(0.2, ("s", 1.0)), "0.2 s"),
        (counted(1, "batch"), "1 batch"),
        (counted(0, "process"), "0 processes"),
        (counted(1200, "rank"), "1,200 ranks"),
        (spanned(["a.0"]), "a.0"),
        (spanned(["a.0", "a.1", "a.2"]), "a.0 .. a.2 (3)"),
    ],
)
def test_numbers_and_names(made, text):
    assert made == text


def test_columns_are_aligned_and_wrapped():
    rows = [("name", "bytes", "why"), ("a", "1,000", "x, " * 60)]
    assert columns([row[:2] for row in rows], right=1) == ["name  bytes", "a     1,000"]
    first, *others = columns(rows, wrapped=2)[1:]
    assert first.startswith("a     1,000  x, x,") and others[0].startswith(" " * 13 + "x, x,")
    assert all(len(line) <= 120 for line in (first, *others)) and columns([]) == []


def test_lines_are_wrapped_with_an_indent():
    long = "    why: " + "word " * 30
    _, first, second = wrapped(f"short\n{long}").splitlines()
    assert first.startswith("    why: word") and second.startswith("        word")
    assert len(first) <= 100 and len(second) <= 100 and f"{first.strip()} {second.strip()}" == long.strip()
    assert wrapped("short") == "short"


def test_names_of_neighbours_in_a_narrow_cell():
    assert spanned_within(["h.0", "h.1"], 20) == "h.0 .. h.1 (2)"
    layers = [f"model.encoder.layers.{number}" for number in range(8, 12)]
    assert spanned_within(layers, 34) == "model.encoder.layers.8 .. 11 (4)"
    assert spanned_within(layers, 22) == "..r.layers.8 .. 11 (4)"
    assert spanned_within(["embed", *layers], 24) == "embed .. ..layers.11 (5)"
    for width in range(22, 60):
        assert all(len(spanned_within(names, width)) <= width for names in (layers, ["embed", *layers], layers[:1]))
