"""The page of octavo agree in a real browser: it draws its figures, complains of nothing and sends no request."""

import pytest

from octavo.engines import agree, attribute, find_suspects, get, model_as
from octavo.engines.token_scores import text_log_probabilities
from octavo.reports.agreement import agreement_page
from octavo.reports.rendering import write_page
from tests.unit.quantization.tiny_models import LINEARS, language_model, windows


@pytest.mark.long
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_page_opens(is_whole, tmp_path, open_page, page_faults):
    model, tokens = language_model(), windows(2, 16)
    found = agree(model, "te-block", "vllm-block", tokens, max_kl=1e-6)
    attribution = attribute(model, found, tokens) if is_whole else None
    suspects = None
    if is_whole:
        logits = model_as(model.model, get("vllm-block"))(tokens[:1, :-1])[0]
        served = [text_log_probabilities(logits, tokens[0, 1:]) - 0.01]  # no match is exact
        suspects = find_suspects(model, found.server, tokens, served, catalogue=[get("vllm-block-cuda")])
    path = tmp_path / "agree.html"
    write_page(path, agreement_page(found, {"model": "<b>small</b>"}, attribution, suspects))
    page = open_page(path)
    page.wait_for_function("document.querySelectorAll('.plot .main-svg').length >= 2")
    effects = 0 if attribution is None else len(attribution.effects)
    assert page.locator("tbody tr").count() == LINEARS + 11 + effects
    assert page.locator("dd").nth(2).inner_text() == "<b>small</b>"
    assert page.locator("ol li").count() == (0 if suspects is None else len(suspects.ranked))
    assert page.get_by_text("The server may be as claimed. The text does not exclude").count() == is_whole
    assert page_faults(path) == []
