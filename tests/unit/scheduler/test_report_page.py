"""Pages and charts are well-formed, escaped, and the same for the same data."""

import sys
import xml.etree.ElementTree as ET
from importlib import reload
from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError
from scheduler import report_page
from scheduler.report_page import chart, page, svg, titled

SVG = "{http://www.w3.org/2000/svg}"


def _bar(length: float) -> str:
    with chart(1.0) as figure:
        axes = figure.subplots()
        axes.barh(0, length, gid=titled('<a> & "b"'))
        axes.set(title="<t>", xlabel="x & y")
        return svg(figure, alt='<alt> "words"')


def test_a_chart_is_well_formed_whatever_is_written_on_it() -> None:
    drawn = ET.fromstring(_bar(3.0))
    assert drawn.get("aria-label") == '<alt> "words"'
    assert {"<t>", "x & y"} <= {text.strip() for text in drawn.itertext()}
    assert [title.text for title in drawn.iter(f"{SVG}title")] == ['<a> & "b"']


def test_a_chart_is_the_same_for_the_same_data() -> None:
    assert _bar(3.0) == _bar(3.0)
    assert _bar(3.0) != _bar(4.0)


def test_a_page_escapes_every_fact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "one.html").write_text(
        '{% extends "report_page.html" %}'
        "{% block body %}{{ words }} {{ 1.5 | figure }}{% endblock %}"
    )
    monkeypatch.setattr(report_page, "files", lambda package: tmp_path)
    (tmp_path / "report_page.html").write_text(
        (Path(report_page.__file__).parent / "report_page.html").read_text()
    )
    shown = page("any", "one.html", title="<t>", words="p<")
    assert "<title>&lt;t&gt;</title>" in shown
    assert "p&lt; 1.500" in shown


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_the_extra_the_error_names_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}.*pip install rosemux\[report\]"):
        reload(report_page)
