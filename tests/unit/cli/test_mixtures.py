"""``octavo generate`` and ``octavo eval`` on folders of mixtures of experts, in high precision and in FP8."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import octavo as octavo_package
from octavo.convert import expert_layers, unfuse_experts
from octavo.export import save_quantized
from octavo.inference import Engine, EngineThread, ModelRunner, load_served_model
from octavo.inference import generate as continue_by_runner
from octavo.inference.llama_layout import as_llama
from octavo.language_model import load_language_model
from octavo.models.llama_folder import write_tokenizer
from octavo.quantization import load_mix, load_qat
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.server import Limits, Service, create_app
from tests.tiny_mixtures import CONTEXT, mixture

pytest.importorskip("transformers", reason="transformers is not installed")
PROMPT = "some text"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some text, some more text, and others of another kind\n" * 300)
    return path


@pytest.fixture
def plain(tmp_path):
    """A folder of a Mixtral whose experts are one weight."""
    made = mixture("Mixtral")
    model: Any = made.model
    model.save_pretrained(tmp_path / "mixtral")
    write_tokenizer(tmp_path / "mixtral", made.tokenizer, context=CONTEXT)
    return tmp_path / "mixtral"


@pytest.fixture(params=["Mixtral", "Qwen2Moe", "Qwen3Moe"])
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


def test_answers_over_http_are_those_of_the_runner_alone(folders):
    from starlette.testclient import TestClient

    prompts = [PROMPT, "another text"]
    for folder in folders:
        served = load_served_model(folder)
        alone = []
        for prompt in prompts:
            ids = served.tokenizer.encode(prompt).ids
            new = list(continue_by_runner(served.runner, ids, max_new_tokens=8, temperature=0.0))
            alone.append(served.tokenizer.decode(new).rstrip("\ufffd"))
        thread = EngineThread(Engine(served.runner, served.tokenizer))
        limits = Limits(max_tokens=50)
        service = Service(name="m", thread=thread, tokenizer=served.tokenizer, template=None, limits=limits)
        asked = {"model": "m", "prompt": prompts, "max_tokens": 8, "temperature": 0}
        with TestClient(create_app(service), base_url="http://127.0.0.1") as client:
            answer = client.post("/v1/completions", json=asked)
        assert thread.drain(60)
        service.close()
        assert answer.status_code == 200, answer.text
        assert [choice["text"].rstrip("\ufffd") for choice in answer.json()["choices"]] == alone


@pytest.mark.long
def test_qat_tunes_experts_and_its_folder_is_the_tuned_model(octavo, plain, text_file, tmp_path):
    out = tmp_path / "qat"
    small = ["--steps", 3, "--batch-size", 2, "--context", 16, "--eval-windows", 2, "--warmup", 1, "--lr", 1e-2]
    result = octavo("qat", plain, "--data", text_file, *small, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert "left" not in record
    tuned = load_qat(out).model
    experts, before = expert_layers(tuned), load_language_model(plain).model
    assert len(experts) == 2 * 4 * 3
    assert experts <= {*json.loads((out / "qat.json").read_text())["layers"]}
    unfuse_experts(before)
    pairs = [[model.get_parameter(f"{path}.weight") for model in (tuned, before)] for path in experts]
    changed = [not torch.equal(now, then) for now, then in pairs]
    assert all(changed)
    assert all(key in octavo_package.scaling_state(tuned) for key in (f"{path}.input.scale" for path in experts))
    windows = evaluation_windows(load_language_model(plain), str(text_file), "test", count=2, length=16)
    with torch.no_grad():
        nats = [F.cross_entropy(tuned(ids[None]).logits[0, :-1], ids[1:]).item() for ids in windows]
    assert torch.tensor(nats).mean().exp() == pytest.approx(record["measured"]["fp8-qat"]["perplexity"], rel=0.02)


@pytest.mark.long
def test_sensitivity_ranks_experts_and_its_mix_is_applied(octavo, plain, text_file, tmp_path):
    small = ["--data", text_file, "--windows", 2, "--verify-windows", 2, "--pairs", 2, "--context", 16]
    result = octavo("sensitivity", plain, *small, "--budget-bytes", "0.7", "--out", tmp_path / "mix", "--json")
    assert result.exit_code == 0, result.output
    assert "left" not in json.loads(result.stdout)
    model, mix = load_language_model(plain).model, load_mix(tmp_path / "mix" / "mix.toml")
    unfuse_experts(model)
    experts = expert_layers(model)
    assert experts & mix.overrides.keys()
    report = mix.apply(model)
    assert experts <= {*report.converted, *report.skipped}


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
def test_a_mix_for_a_servers_format_is_exported_in_it(octavo, plain, text_file, tmp_path):
    """Verified by transformers and octavo; all experts of a layer have one scheme."""
    small = ["--data", text_file, "--windows", 2, "--verify-windows", 2, "--pairs", 2, "--context", 16]
    asked = ["--budget-bytes", "0.75", "--budget-perplexity", "20%"]
    fmt = ["--format", "compressed-tensors"]
    result = octavo("sensitivity", plain, *small, *asked, *fmt, "--out", tmp_path / "mix", "--json")
    assert result.exit_code == 0, result.output
    chosen = load_mix(tmp_path / "mix" / "mix.toml").overrides
    experts = [{each for path, each in chosen.items() if f".{layer}.mlp.experts." in path} for layer in (0, 1)]
    assert all(len(schemes) == 1 for schemes in experts)
    assert experts != [{"bf16"}] * 2
    result = octavo("export", plain, "--mix", tmp_path / "mix" / "mix.toml", *fmt, "--out", tmp_path / "fp8", "--json")
    assert result.exit_code == 0, result.output
    saved = json.loads(result.stdout)
    assert saved["reader"] == "transformers"
    assert not any("refuse this folder" in note for note in saved["notes"])
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    ignored = [path for path in config["ignore"] if ".experts." in path]
    assert len(ignored) == sum(choice == "bf16" for path, choice in chosen.items() if ".experts." in path)
