"""A whole run: what it measures, what it leaves alone, and the folder it writes."""

import copy
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.checksums import SUMS
from octavo.errors import CheckpointError, ConfigError
from octavo.files import claimed_folder
from octavo.language_model import LanguageModel, load_language_model
from octavo.models import Llama
from octavo.quantization import QATResult, QATSettings, TuneSettings, compensate_rounding, load_qat, run_qat, save_qat
from octavo.quantization.qat.tuning import TuneStep, tune, window_nats
from tests.unit.quantization.tiny_model import tiny_language_model, windows

TUNING = TuneSettings(steps=4, batch_size=2, context=16, learning_rate=1e-2, warmup=1)
TRAINING, HELD_OUT = windows(8), windows(5, seed=1)
AROUND = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def settings_of(recipe: str = "static", **options: Any) -> QATSettings:
    return QATSettings(**{"recipe": recipes.get(recipe), "tuning": TUNING, **options})


def ran(settings: QATSettings, model: LanguageModel | None = None) -> QATResult:
    return run_qat(model or tiny_language_model(), settings, training=TRAINING, held_out=HELD_OUT)


@pytest.fixture(scope="module")
def result() -> QATResult:
    return ran(settings_of(baseline=True))


@pytest.mark.long
def test_qat_run_does_not_change_the_callers_model():
    model = tiny_language_model()
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    ran(settings_of(baseline=True), model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.model.state_dict().items())
    assert not any(isinstance(module, octavo.nn.Linear) for module in model.model.modules())


@pytest.mark.long
def test_all_perplexities_are_measured_in_the_same_surrounding_precision(result):
    """Perplexities by hand: BF16 as it came, its FP8 with a maximum over the training windows, the one that is left."""
    assert list(result.windows) == ["bf16", "fp8", "bf16-tuned", "fp8-of-tuned", "fp8-qat"]
    assert list(result.steps) == ["bf16-tuned", "fp8-qat"]
    plain = tiny_language_model().model
    octavo.convert(plain, "bf16", convert_head=True)
    assert window_nats(plain, HELD_OUT, surroundings=AROUND) == result.windows["bf16"]
    made = copy.deepcopy(result.language_model.model)
    octavo.convert(made, "bf16", convert_head=True, layer_filter=lambda path, _: path not in result.report.converted)
    assert window_nats(made, HELD_OUT, surroundings=AROUND) == result.windows["fp8-qat"]
    amaxes: dict[str, float] = {}

    def remember(path: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            amaxes[path] = max(amaxes.get(path, 0.0), inputs[0].bfloat16().abs().max().item())

        return hook

    quantized = tiny_language_model().model
    report = octavo.convert(quantized, "static")
    octavo.convert(quantized, "bf16", convert_head=True, layer_filter=lambda path, _: path not in report.converted)
    observed = tiny_language_model().model
    octavo.convert(observed, "bf16", convert_head=True)
    for path in report.converted:
        observed.get_submodule(path).register_forward_pre_hook(remember(path))
    with torch.no_grad(), AROUND:
        observed(TRAINING)
    assert len(amaxes) == len(report.converted) == 14
    state = {f"{path}.input.scale": octavo.numerics.scale_from_amax(torch.tensor(amax), octavo.E4M3)
             for path, amax in amaxes.items()}  # fmt: skip
    octavo.load_scaling_state(quantized, state)
    assert window_nats(quantized, HELD_OUT, surroundings=AROUND) == result.windows["fp8"]


@pytest.mark.long
def test_differences_are_paired_with_the_tuned_bf16_model(result):
    assert result.reference == "bf16-tuned"
    assert result.gap("bf16-tuned").nats == 0
    gap = result.gap("fp8-qat")
    pairs = zip(result.windows["fp8-qat"], result.windows["bf16-tuned"], strict=True)
    assert gap.nats == pytest.approx(sum(a - b for a, b in pairs) / 5)
    assert result.perplexity("fp8-qat") < result.perplexity("fp8")  # it has learned to count


def test_both_tunings_see_the_same_batches(result):
    """The first loss of both is that of the same batch before any update, in BF16 and in FP8."""
    first = {name: steps[0].loss for name, steps in result.steps.items()}
    assert first["fp8-qat"] == pytest.approx(first["bf16-tuned"], rel=2e-3)
    assert first["fp8-qat"] != first["bf16-tuned"]


def test_without_a_baseline_nothing_else_is_tuned():
    found = ran(settings_of("tensorwise"))
    assert list(found.windows) == ["bf16", "fp8", "fp8-qat"]
    assert found.reference == "bf16"
    assert list(found.steps) == ["fp8-qat"]


def test_skipped_layers_stay_in_high_precision_and_the_head_comes_if_asked():
    found = ran(settings_of("rowwise", skip=("*.down_proj",), convert_head=True))
    assert "lm_head" in found.report.converted
    assert not any(path.endswith("down_proj") for path in found.report.converted)


class Dropping(nn.Module):
    """Dropout around a model's feed-forward layer, which octavo's own models have not."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(x), 0.3, self.training)


@pytest.mark.long
def test_the_seed_says_what_dropout_drops_and_leaves_the_callers_generator_alone():
    """Both tunings drop the same, and a second run too."""
    losses = []
    for noise, seed in ((1, 0), (2, 0), (1, 7)):
        model = tiny_language_model()
        layer: Any = model.model.get_submodule("model.layers.0")
        layer.mlp = Dropping(layer.mlp)
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        found = ran(settings_of(baseline=True, tuning=replace(TUNING, high_precision_share=0.5, seed=seed)), model)
        assert torch.equal(torch.get_rng_state(), state)
        losses.append({name: [step.loss for step in steps] for name, steps in found.steps.items()})
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert losses[0]["fp8-qat"][:2] == losses[0]["bf16-tuned"][:2]


@pytest.mark.long
def test_a_layer_that_no_window_reaches_is_not_measured_as_fp8():
    model = tiny_language_model()
    layer: Any = model.model.get_submodule("model.layers.0")
    layer.never = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match=r"no training window reaches layer 'model\.layers\.0\.never'"):
        ran(settings_of(), model)
    assert "bf16" in ran(settings_of(skip=("*.never",)), model).windows


@pytest.mark.parametrize("scales", ["learned", "frozen"])
def test_other_ways_to_find_scales(scales):
    found = ran(settings_of(scales=scales))
    assert len(octavo.scaling_state(found.language_model.model)) == 14
    assert all(scale > 0 for scale in octavo.scaling_state(found.language_model.model).values())


@pytest.mark.long
def test_high_precision_steps_match_the_baseline():
    """To the last digit, with static scales that nobody has found yet; then the casts begin."""
    tuning = replace(TUNING, high_precision_share=0.5, distill=0.5)
    found = ran(settings_of(baseline=True, tuning=tuning))
    baseline, trained = (found.steps[name] for name in ("bf16-tuned", "fp8-qat"))
    assert [step.loss for step in trained[:2]] == [step.loss for step in baseline[:2]]
    assert trained[2].loss < 0.6 * baseline[2].loss  # half of it measures how far it is from its teacher, itself
    assert trained[3].loss != baseline[3].loss


@pytest.mark.long
def test_weights_rounded_by_data_are_nearer_to_the_tuned_model():
    """Rounded by the training windows, measured on others; only where it is asked for."""
    tuning = replace(TUNING, steps=40, learning_rate=3e-3)
    trained = windows(80)
    found = run_qat(
        tiny_language_model(), settings_of("weight_only", baseline=True, by_data=True, tuning=tuning),
        training=trained, held_out=HELD_OUT,
    )  # fmt: skip
    assert abs(found.gap("fp8-by-data").nats) < abs(found.gap("fp8-of-tuned").nats)


@pytest.mark.long
@pytest.mark.parametrize("by_data", [False, True])
def test_training_ends_with_weights_rounded_by_data_if_it_is_to(by_data):
    """The losses in training are those without, and the weights are moved afterwards: as by hand."""
    found = ran(settings_of("weight_only", by_data=by_data))
    model = tiny_language_model().model
    report = octavo.prepare_qat(model, "weight_only")
    octavo.convert(model, "bf16", convert_head=True, layer_filter=lambda path, _: path not in report.converted)
    again: list[TuneStep] = []
    tune(model, TRAINING, TUNING, surroundings=AROUND, on_step=again.append)
    assert [step.loss for step in found.steps["fp8-qat"]] == [step.loss for step in again]
    if by_data:
        with AROUND:
            compensate_rounding(model, [window[None] for window in TRAINING])
    made = found.language_model.model.state_dict()
    assert all(torch.equal(made[name], weight) for name, weight in model.state_dict().items())


def test_the_teacher_is_the_model_that_was_there_when_the_casts_began():
    """After two steps in high precision: by hand, the same losses."""
    tuning = replace(TUNING, distill=0.5, high_precision_share=0.5)
    found = ran(settings_of("weight_only", tuning=tuning))
    teacher, student = tiny_language_model().model, tiny_language_model().model
    octavo.convert(teacher, "bf16", convert_head=True)
    report = octavo.prepare_qat(student, "weight_only")
    octavo.convert(student, "bf16", convert_head=True, layer_filter=lambda path, _: path not in report.converted)

    def before_casts() -> None:
        teacher.load_state_dict(student.state_dict())

    def teach(tokens: torch.Tensor) -> torch.Tensor:
        with AROUND:
            return teacher(tokens)

    again: list[TuneStep] = []
    hooks: dict[str, Any] = {"teacher": teach, "before_casts": before_casts, "on_step": again.append}
    tune(student, TRAINING, tuning, surroundings=AROUND, **hooks)
    assert [step.loss for step in found.steps["fp8-qat"]] == [step.loss for step in again]


@pytest.mark.long
def test_distillation_reaches_the_loop():
    plain, distilled = (ran(settings_of(tuning=replace(TUNING, distill=weight))) for weight in (0.0, 0.5))
    assert plain.steps["fp8-qat"][0].loss > 1.9 * distilled.steps["fp8-qat"][0].loss  # teacher and student agree


@pytest.mark.parametrize("recipe", ["static", "rowwise", "weight_only"])
def test_a_loaded_model_computes_the_same_to_the_bit(recipe, tmp_path):
    """With and without autocast; what takes no part is a plain layer in both."""
    found = ran(settings_of(recipe, skip=("*.down_proj",)))
    save_qat(tmp_path / "qat", found)
    loaded = load_qat(tmp_path / "qat")
    for path, layer in loaded.model.named_modules():
        assert type(layer) is type(found.language_model.model.get_submodule(path)), path
    with torch.no_grad():
        assert torch.equal(loaded.logits(HELD_OUT), found.language_model.logits(HELD_OUT))
        with AROUND:
            assert torch.equal(loaded.logits(HELD_OUT), found.language_model.logits(HELD_OUT))


def test_a_tied_head_trains_and_keeps_the_embedding_that_it_is_when_rounded_by_data():
    said: list[tuple[object, ...]] = []
    settings = settings_of("weight_only", by_data=True, convert_head=True)
    run_qat(
        tiny_language_model(tie=True), settings, training=TRAINING, held_out=HELD_OUT,
        on_phase=lambda *words: said.append(words),
    )  # fmt: skip
    assert ("round by data", 8, 8, "not lm_head: other modules use it too") in said


def test_saved_run_has_its_model_tokenizer_and_metrics(result, tmp_path):
    save_qat(tmp_path / "qat", result)
    loaded = load_qat(tmp_path / "qat")
    assert isinstance(loaded.model, Llama)
    assert loaded.context == 32
    assert loaded.tokenizer.to_str() == result.language_model.tokenizer.to_str()
    lines = [json.loads(line) for line in (tmp_path / "qat/metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step"] * 8 + ["evaluation"] * 5
    assert lines[-1]["perplexity"] == result.perplexity("fp8-qat")
    assert [path.name for path in tmp_path.iterdir()] == ["qat"]


@pytest.mark.parametrize("tie", [False, True])
def test_transformers_reads_the_folder(tmp_path, tie):
    """The tuned weights in high precision, as an ordinary model of Hugging Face's."""
    found = ran(settings_of("tensorwise"), tiny_language_model(tie=tie))
    save_qat(tmp_path / "qat", found)
    theirs = load_language_model(tmp_path / "qat")
    assert type(theirs.model).__name__ == "LlamaForCausalLM"
    assert theirs.tokenizer.encode("some text").ids == found.language_model.tokenizer.encode("some text").ids
    ours = load_qat(tmp_path / "qat")
    octavo.restore(ours.model)
    with torch.no_grad():
        torch.testing.assert_close(theirs.logits(HELD_OUT), ours.logits(HELD_OUT), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_model_of_transformers_is_tuned_and_saved(tmp_path):
    save_qat(tmp_path / "first", ran(settings_of("tensorwise")))
    theirs = load_language_model(tmp_path / "first")
    found = ran(settings_of("static"), theirs)
    assert found.perplexity("fp8-qat") < found.perplexity("bf16")
    save_qat(tmp_path / "second", found)
    loaded = load_qat(tmp_path / "second")
    assert len(octavo.scaling_state(loaded.model)) == 14
    with torch.no_grad():
        assert torch.equal(loaded.logits(HELD_OUT), found.language_model.logits(HELD_OUT))


@pytest.fixture
def saved(result, tmp_path) -> Path:
    save_qat(tmp_path / "qat", result)
    return tmp_path / "qat"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("qat.json", None, "name a folder that octavo qat wrote"),
        ("qat.json", "{}", "cannot be read"),
        ("qat.json", '{"format": 2, "layout": "llama", "layers": []}', "format 2"),
        ("config.json", "[]", "is not the configuration of a Llama"),
        ("model.safetensors", "torn", "cannot be read"),
        ("tokenizer.json", "torn", "cannot be read"),
        ("recipe.toml", "torn", "is damaged"),
        ("scales.safetensors", None, "is damaged"),
    ],
)
def test_a_damaged_folder_is_refused(saved, name, content, words):
    (saved / SUMS).unlink()  # it would see each
    (saved / name).unlink()
    if content is not None:
        (saved / name).write_text(content)
    with pytest.raises(CheckpointError, match=words):
        load_qat(saved)


@pytest.mark.parametrize("load", [load_qat, load_language_model])
def test_every_flipped_bit_of_the_weights_is_refused(saved, load):
    file = saved / "model.safetensors"
    whole = file.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 60):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=rf"{file}' is damaged or was edited"):
            load(saved)
    file.write_bytes(whole)
    load(saved)


@pytest.mark.parametrize("name", ["recipe.toml", "scales.safetensors", "metrics.jsonl"])
def test_a_changed_file_beside_the_weights_is_refused(saved, name):
    (saved / name).write_bytes((saved / name).read_bytes() + b"\n")
    with pytest.raises(CheckpointError, match=rf"{name}' is damaged or was edited"):
        load_qat(saved)


def test_layers_or_scales_of_another_model_are_refused(saved):
    (saved / SUMS).unlink()
    mark = json.loads((saved / "qat.json").read_text())
    (saved / "qat.json").write_text(json.dumps(mark | {"layers": [*mark["layers"], "model.layers.7.mlp.up_proj"]}))
    with pytest.raises(CheckpointError, match=r"has no layer 'model\.layers\.7"):
        load_qat(saved)
    (saved / "qat.json").write_text(json.dumps(mark | {"layers": mark["layers"][1:]}))
    with pytest.raises(CheckpointError, match=r"1 entry \(.*\) has no layer in this model"):
        load_qat(saved)


def test_weights_of_another_shape_are_refused(saved):
    (saved / SUMS).unlink()
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="do not match the shape"):
        load_qat(saved)


def test_a_folder_that_holds_something_is_not_written_to(result, saved):
    kept = (saved / "qat.json").read_bytes()
    with pytest.raises(ConfigError, match="is not empty"), claimed_folder(saved):
        pass
    with pytest.raises(ConfigError, match="is taken"):
        save_qat(saved, result)
    assert (saved / "qat.json").read_bytes() == kept
    assert [path.name for path in saved.parent.iterdir()] == ["qat"]


def test_an_interrupted_write_leaves_nothing(result, tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.quantization.qat.folder.write_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt), claimed_folder(tmp_path / "qat"):
        save_qat(tmp_path / "qat", result)
    assert list(tmp_path.iterdir()) == []


def test_a_claimed_folder_gives_way_to_the_result(result, tmp_path):
    with claimed_folder(tmp_path / "a" / "qat"):
        assert (tmp_path / "a" / "qat").is_dir()
        save_qat(tmp_path / "a" / "qat", result)
    assert load_qat(tmp_path / "a" / "qat").source == str(tmp_path / "a" / "qat")
    shutil.rmtree(tmp_path / "a")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scales": "guessed"}, "scales must be one of"),
        ({"recipe": recipes.get("bf16")}, "casts no weight"),
        ({"scales": "learned", "tuning": replace(TUNING, freeze_share=1.0)}, "start at the first batch that is cast"),
        (
            {"scales": "learned", "tuning": replace(TUNING, steps=2, high_precision_share=0.5, freeze_share=0.6)},
            "lower",
        ),
    ],
)
def test_settings_that_make_no_sense(options, words):
    with pytest.raises(ConfigError, match=words):
        settings_of(**options)
