"""The page of engines: every profile, and every property with its value, source and proof."""

import pytest

from octavo.engines import NOT_RUN, PROFILES, properties_of, source_of

site_pages = pytest.importorskip("scripts.site_pages", reason="mkdocs is not installed")


@pytest.fixture(scope="module")
def page():
    return site_pages.engines_page()


@pytest.mark.parametrize("name", PROFILES)
def test_every_property_of_a_profile_is_listed(page, name):
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(properties_of(PROFILES[name]))
    for prop, value in properties_of(PROFILES[name]).items():
        source = source_of(PROFILES[name], prop)
        expected = f"| `{prop}` | {value} | {source.project} {source.version}, `{source.file}` | {source.proof} |"
        assert expected in rows


def test_the_overview_says_what_was_not_run(page):
    overview = page.split("\n## ")[0]
    assert f"| [`te-mxfp8`](#te-mxfp8) | Transformer Engine, MXFP8BlockScaling | {NOT_RUN} | {NOT_RUN} |" in overview
    assert "| [`torchao-rowwise`](#torchao-rowwise) | torchao, rowwise | test_torchao.py |" in overview
    assert overview.count("| [`") == len(PROFILES)
