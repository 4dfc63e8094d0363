"""``octavo generate`` and ``octavo eval`` on folders of mixtures of experts, in high precision and in FP8."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import octavo as octavo_package
from octavo.convert import unfuse_experts
from octavo.export import save_quantized
from octavo.inference import ModelRunner
from octavo.inference import generate as continue_by_runner
from octavo.inference.llama_layout import as_llama
from octavo.language_model import load_language_model
from octavo.models.llama_folder import write_tokenizer
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from tests.tiny_mixtures import CONTEXT, mixture

pytest.importorskip("transformers", reason="transformers is not installed")
PROMPT = "some text"


@pytest.fixture(params=["Mixtral", "Qwen3Moe"])
def folders(tmp_path, request):
    """The model in high precision and in FP8."""
    made = mixture(request.param)
    model: Any = made.model
    model.save_pretrained(tmp_path / "plain")
    write_tokenizer(tmp_path / "plain", made.tokenizer, context=CONTEXT)
    unfuse_experts(made.model)
    octavo_package.convert(made.model, "rowwise")
    save_quantized(made, tmp_path / "fp8", verify_folder=False, dtype="fp32")
    return tmp_path / "plain", tmp_path / "fp8"


def test_generate_takes_the_likeliest_tokens(octavo, folders):
    """Of transformers in high precision, and of the engine where there are codes."""
    for folder in folders:
        loaded = load_language_model(folder)
        ids = loaded.tokenizer.encode(PROMPT).ids
        if folder.name == "fp8":
            runner = ModelRunner(as_llama(loaded.model, "m"))
            new = list(continue_by_runner(runner, ids, max_new_tokens=8, temperature=0.0))
        else:
            new = []
            for _ in range(8):
                new.append(int(loaded.logits(torch.tensor([ids + new]))[0, -1].argmax()))
        arguments = ["generate", folder, "--prompt", PROMPT, "--max-new-tokens", 8, "--temperature", 0]
        result = octavo(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout == PROMPT + loaded.tokenizer.decode(new).rstrip("\ufffd") + "\n"


def test_eval_is_the_loss_of_transformers(octavo, folders, tmp_path):
    """In FP8 of octavo's own reading of the codes, whose inputs are cast."""
    text, nats = tmp_path / "text.txt", []
    text.write_text("some text, some more text\n" * 200)
    for folder in folders:
        result = octavo("eval", folder, "--data", text, "--split", "all", "--windows", 1, "--context", 16, "--json")
        assert result.exit_code == 0, result.output
        record, loaded = json.loads(result.stdout), load_language_model(folder)
        (ids,) = evaluation_windows(loaded, str(text), "all", count=1, length=16)
        loss = F.cross_entropy(loaded.logits(ids[None])[0, :-1], ids[1:])
        assert record["nats"] == pytest.approx(loss.item(), rel=1e-4)
        nats.append(record["nats"])
    assert 0 < abs(nats[0] - nats[1]) < 0.1


def test_generate_of_other_experts_passes_over_the_whole_text(octavo, tmp_path):
    made = mixture("GptOss")
    octavo_package.convert(made.model, "rowwise")
    save_quantized(made, tmp_path / "fp8", format="octavo", verify_folder=False)
    result = octavo("generate", tmp_path / "fp8", "--prompt", PROMPT, "--max-new-tokens", 3)
    assert result.exit_code == 0, result.output
