"""Notes of an agreement: what the numbers rest on, of both engines and of one."""

import pytest
import torch

from octavo.engines import Agreement, get
from octavo.engines.summary import notes
from octavo.engines.token_scores import score_tokens


def agreement(trainer, server):
    """Of one window of equal logits."""
    logits = torch.zeros(3, 8)
    scores = (score_tokens(logits, logits, torch.arange(3), torch.Generator().manual_seed(0)),)
    return Agreement(
        trainer=get(trainer), server=get(server), layers=(), scores=scores, floor=scores, length=4, is_equal=True
    )


@pytest.mark.parametrize(
    ("trainer", "server", "named"),
    [
        ("te-block", "vllm-block", ["vllm-block", "te-block"]),
        ("vllm-block", "vllm-block", ["vllm-block"]),
        ("octavo-token", "vllm-block", ["vllm-block"]),  # a test proves each of octavo's properties
        ("octavo-token", "octavo-token", []),
        ("vllm-token", "vllm-token+fp8-cache", ["vllm-token+fp8-cache", "vllm-token"]),
    ],
)
def test_the_notes_name_what_no_test_proves_of_each_engine_once(trainer, server, named):
    first, *unproven = notes(agreement(trainer, server))
    assert first.startswith(f"1 windows of 4 tokens; ± is a 95 % interval over windows. Floor: {trainer} with")
    assert [sentence.split(", read, not run: ")[0] for sentence in unproven] == named
