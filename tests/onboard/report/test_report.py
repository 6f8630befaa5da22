import re

import onboarded
import pytest
from html_balance import Balance

from dayzero.onboard.report.report import readable_bytes, readable_count


@pytest.fixture(scope="module")
def pages():
    folder = onboarded.get("mixtral", align=True).package
    return (folder / "REPORT.md").read_text(), (folder / "report.html").read_text()


def test_the_page_is_whole_and_refers_to_nothing_outside(pages):
    page = Balance()
    page.feed(pages[1])
    assert (page.open, page.problems, page.references) == ([], [], [])
    assert not re.search(r"https?://|url\(|@import|<script|<iframe", pages[1])


def test_both_reports_say_the_same_verdicts_and_figures(pages):
    made = onboarded.get("mixtral", align=True)
    for text in pages:
        assert "mixtral" in text
        assert "MixtralForCausalLM" in text
        for name, rung in made.outcome.alignment.bounded().rungs.items():
            assert name in text
            assert rung.verdict in text
            assert rung.where.split(":")[0] in text
        for block in ("GroupedQueryAttention", "MixtureOfExperts", "RMSNorm"):
            assert block in text
        assert "router_jitter_noise" in text


def test_the_verdict_is_in_the_first_lines(pages):
    assert pages[0].splitlines()[2].startswith("**PASS**")
    assert pages[1].index(">PASS<") < pages[1].index("<h2>")


def test_every_table_row_of_the_markdown_fits_its_head(pages):
    width = None
    for line in pages[0].splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = line.replace("\\|", "").count("|")
        width = width or cells
        assert cells == width, line


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1.5e9, "1.5 GB"), (2.78e15, "2.78e+03 TB")]
)
def test_bytes(count, text):
    assert readable_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (373e6, "373 M"), (2.78e12, "2.78 T"), (31_000, "31 k")])
def test_counts(count, text):
    assert readable_count(count) == text
