"""Pictures: well-formed, escaped, and true to their data."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.pictures.axes import ticks
from scheduler.pictures.charts import Bar, Series, Words, bars, curves, stacked
from scheduler.pictures.gantt import IDLE, Stint, gantt_svg, gantt_text
from scheduler.pictures.page import page, section, table

SVG = "{http://www.w3.org/2000/svg}"
WORDS = Words(title="<t>", x="x & y", y="y", alt='"alt"')


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 8
    assert all(low - span * 1e-6 <= value <= low + span * (1 + 1e-6) for value in found)
    assert found == sorted(set(found))


def test_a_chart_is_well_formed_whatever_is_written_on_it() -> None:
    series = [Series(name="<a>", colour="#000", points=[(0, 1), (1, 3)])]
    for svg in (curves(series, WORDS, limit_x=0.5), stacked(series * 2, WORDS)):
        assert "<a>" in "".join(ET.fromstring(svg).itertext())


def test_a_bar_is_as_long_as_its_value() -> None:
    rows = [Bar(name="a", value=1.0, words="1", colour="#111111")]
    rows.append(Bar(name="b", value=4.0, words="4", colour="#222222"))
    drawn = ET.fromstring(bars(rows, title="t", alt="t"))
    width = {each.get("fill"): float(each.get("width", "0")) for each in drawn.iter(f"{SVG}rect")}
    assert width["#222222"] == pytest.approx(4 * width["#111111"], abs=0.3)


STINTS = [
    Stint(row="r0", actor="x", start_s=0, end_s=50, partial=False),
    Stint(row="r0", actor="x", start_s=50, end_s=75, partial=True),
    Stint(row="r0", actor="y", start_s=50, end_s=100, partial=False),
]


def test_a_text_picture_shows_each_node_s_jobs() -> None:
    lines = gantt_text(["r0", "t0"], ["x", "y"], STINTS, length_s=100, columns=8)
    assert lines == [("r0", "AAAABBBB"), ("", f"{IDLE * 4}aa{IDLE * 2}"), ("t0", IDLE * 8)]


def test_a_picture_has_a_bar_for_every_stint_and_a_key() -> None:
    drawn = ET.fromstring(gantt_svg(["r0"], ["x", "y"], STINTS, length_s=100, alt="who"))
    assert len(list(drawn.iter(f"{SVG}rect"))) == len(STINTS) + 2
    assert drawn.get("aria-label") == "who"


def test_a_page_escapes_texts_and_cells() -> None:
    shown = page("<t>", "a & b", [section("s<", "p<", table(["h<"], [["c<", 1.5], [2.0]]))])
    assert "<t>" not in shown
    assert all(f"{name}&lt;" in shown for name in "sphc")
    assert '<td class="n">1.500</td>' in shown
