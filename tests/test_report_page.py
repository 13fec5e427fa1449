"""The report page: complete in itself, text stays text, and it works in a real browser."""

import json
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from browser import chromium
from eaglet.charts import Bar, Line, duration, histogram, lines, nice, short, timeline
from eaglet.files import read_json
from eaglet.lineage import read_chain
from eaglet.report_page import report_page
from synthetic_run import HOSTILE, RUN, STORE


class Page(HTMLParser):
    """Tags with their attributes, the text of table cells, and the embedded rows."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.cells, self.rows, self._in = [], [], "", ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._in = "rows" if dict(attributes).get("id") == "data" else tag

    def handle_data(self, data):
        if self._in == "rows":
            self.rows += data
        elif self._in in ("td", "code"):
            self.cells.append(data)

    def handle_endtag(self, tag):
        self._in = ""


@pytest.fixture(scope="module")
def html(audited_run):
    return (audited_run / RUN / "audit/report.html").read_text()


def test_loads_nothing(html):
    for tag, attributes in Page(html).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert not {"src", "srcset", "data"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in html
    assert "@import" not in html


def test_hostile_text_makes_no_element(html):
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [a for _, attributes in page.tags for a in attributes if a.startswith("on")]
    assert HOSTILE not in html


def test_the_row_browser_holds_every_row_of_a_small_run(html, audited_run):
    rows = json.loads(Page(html).rows)
    assert len(rows) == 21
    hostile = [row for row in rows if HOSTILE in "".join(s["text"] for s in row["prompt"])]
    assert len(hostile) == 2
    assert {row["fate"] for row in rows} == {"train", "heldout", "quarantined"}
    assert [s["text"] for s in hostile[0]["output"] if s["kind"] == "marker"] == ["</think>", "<|endoftext|>"]
    assert hostile[0]["source"]["line"] == 1


def test_shows_drops_with_their_reasons(html):
    assert {"duplicate", "truncated"} <= set(Page(html).cells)


def test_the_row_browser_holds_a_sample_of_a_large_run(demo_run, monkeypatch):
    monkeypatch.setattr("eaglet.report_page.ROWS_PER_DATASET", 4)
    chain = read_chain(demo_run, read_json("config.json"))
    rows = json.loads(Page(report_page(chain, STORE)).rows)
    assert sorted(row["dataset"] for row in rows) == ["code"] * 4 + ["notes"] * 4


def test_in_a_browser_rows_are_shown_and_hostile_text_stays_text(audited_run, tmp_path):
    page = audited_run / RUN / "audit/report.html"
    dom = chromium(page, tmp_path / "profile", "--dump-dom")
    assert "<title>eaglet: demo</title>" in dom
    assert re.search(r'<small id="count">21 rows</small>', dom)
    shown = dom[dom.index('id="shown"') : dom.index('id="jobs"')]
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;" in shown
    assert re.search(r'<mark class="opening"[^>]*>&lt;think&gt;</mark>', shown)
    assert "<img" not in dom


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_the_page_is_painted(scheme, audited_run, tmp_path):
    options = [f"--screenshot={tmp_path / 'page.png'}", "--window-size=1280,900"]
    if scheme == "dark":
        options.append("--blink-settings=preferredColorScheme=0")
    chromium(audited_run / RUN / "audit/report.html", tmp_path / "profile", *options)
    grey = Image.open(tmp_path / "page.png").convert("L")
    assert grey.size == (1280, 900)
    assert (grey.getpixel((4, 4)) > 200) == (scheme == "light")
    assert len(grey.resize((64, 64)).getcolors()) > 20, "an empty page"


def test_a_run_of_many_jobs_has_one_box_for_each_stage(demo_run, monkeypatch):
    monkeypatch.setattr("eaglet.report_page.SHOWN_ALONE", 1)
    html = report_page(read_chain(demo_run, read_json("config.json")), STORE)
    graph = html[html.index('<svg class="graph"') :]
    graph = graph[: graph.index("</svg>")]
    assert graph.count('class="node"') == 9  # sources, turn format, and the seven stages after it
    assert "2 sources" in graph


def test_figures_are_labelled_and_escaped():
    assert histogram([1, 2, 3, 90], label="a < b").count("a &lt; b") == 2
    assert "<title>x &amp; y</title>" in lines([Line("x & y", [(1, 2.0), (2, 1.0)])], label="step")
    assert histogram([], label="nothing") and lines([], label="nothing")


def test_idle_time_is_cut_out_of_the_timeline():
    drawn = timeline([Bar("a", "s", 0, 10, ""), Bar("b", "s", 100_000, 100_010, "")])
    assert 'class="gap"' in drawn
    assert ">20 s<" in drawn


@pytest.mark.parametrize(("value", "rounded"), [(1, 1), (3, 4), (17, 20), (2600, 4000), (0.3, 0.4)])
def test_axes_end_at_round_numbers(value, rounded):
    assert nice(value) == pytest.approx(rounded)


def test_numbers_and_times_are_short():
    assert [short(v) for v in (0.25, 12, 1500, 2_000_000)] == ["0.25", "12", "1.5k", "2M"]
    assert [duration(s) for s in (0.44, 38, 125, 12_000)] == ["0.4 s", "38 s", "2 min 5 s", "3 h 20 min"]
