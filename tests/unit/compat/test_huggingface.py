"""Scaling state in a real ``transformers.Trainer``'s checkpoints."""

import warnings
from contextlib import nullcontext

import pytest
import torch

import octavo

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from octavo.compat.huggingface import FP8Callback, ScalingStateCallback  # noqa: E402 (needs transformers)
from octavo.compat.huggingface_numbers import FP8Numbers  # noqa: E402
from octavo.errors import ConfigError  # noqa: E402
from tests.tiny_llama import TinyTexts, tiny_hugging_face_config  # noqa: E402


def trainer_of(folder, *callbacks, steps=6, seed=0, convert=True, **changes):
    torch.manual_seed(seed)
    config = tiny_hugging_face_config(vocab_size=32, num_hidden_layers=1)
    model = transformers.LlamaForCausalLM(config)
    if convert:
        octavo.convert(model, "delayed")
    arguments = {
        "max_steps": steps, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.01,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_steps": 3, "report_to": [], "disable_tqdm": True,
        "use_cpu": True,
    }  # fmt: skip
    settings = transformers.TrainingArguments(output_dir=str(folder), **(arguments | changes))
    return transformers.Trainer(model=model, args=settings, train_dataset=TinyTexts(), callbacks=list(callbacks))


def losses_of(trainer):
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


@pytest.mark.long
@pytest.mark.parametrize("restore", [False, True], ids=["of the deprecated callback", "restored by the Trainer"])
def test_training_resumes_bit_for_bit_from_wherever_the_checkpoint_lies(tmp_path, restore):
    with nullcontext() if restore else pytest.warns(DeprecationWarning, match=r"FP8Callback\(None, interval=0\) saves"):
        first = FP8Callback(None, interval=0) if restore else ScalingStateCallback()
    through = trainer_of(tmp_path / "through", first)
    through.train()
    (tmp_path / "through/checkpoint-3").rename(tmp_path / "moved")
    changes = {"restore_callback_states_from_checkpoint": restore}
    resumed = trainer_of(tmp_path / "resumed", FP8Callback(None, interval=0), seed=1, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "moved"))
    assert losses_of(resumed) == losses_of(through)
    for one, other in zip(resumed.model.parameters(), through.model.parameters(), strict=True):
        assert torch.equal(one, other)
    state, same = octavo.scaling_state(resumed.model), octavo.scaling_state(through.model)
    assert all(torch.equal(state[key], same[key]) for key in same)
    assert same["model.layers.0.self_attn.q_proj.input.steps"].item() == 6


@pytest.mark.long
def test_missing_callback_warns_on_saving_and_on_resuming(tmp_path):
    through = trainer_of(tmp_path / "through")
    with pytest.warns(UserWarning, match="saved without the scaling state"):
        through.train()
    resumed = trainer_of(tmp_path / "resumed", FP8Callback(None, interval=0), seed=1)
    with pytest.warns(UserWarning, match="holds no scaling state: delayed scaling starts anew"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "through/checkpoint-3"))
    assert losses_of(resumed) != losses_of(through), "the scaling state matters here"


@pytest.mark.long
def test_another_recipe_on_resuming_warns(tmp_path):
    options = {"convert": False, "steps": 4, "save_steps": 2}
    trainer_of(tmp_path, FP8Callback("tensorwise"), **options).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.warns(UserWarning, match="step 2 was trained with recipe 'tensorwise', and goes on with 'rowwise'"):
        trainer_of(tmp_path / "rows", FP8Callback("rowwise"), **options).train(resume_from_checkpoint=checkpoint)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was trained with recipe")
        trainer_of(tmp_path / "same", FP8Callback("tensorwise"), **options).train(resume_from_checkpoint=checkpoint)


def test_callback_added_after_the_trainer_was_built_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, convert=False)
    trainer.add_callback(FP8Callback(interval=0))
    with pytest.raises(ConfigError, match=r"came after the Trainer was built; pass it as Trainer\(callbacks="):
        trainer.train()


@pytest.mark.long
def test_callback_reused_by_another_trainer_starts_fresh(tmp_path):
    callback = FP8Callback("delayed", interval=0)
    first = trainer_of(tmp_path / "first", callback, steps=2, convert=False)
    first.train()
    again = trainer_of(tmp_path / "again", callback, steps=2, convert=False)
    again.train()
    assert losses_of(again) == losses_of(first)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_resume_matches_uninterrupted_run_with_one_callback(tmp_path, recipe):
    through = trainer_of(tmp_path / "through", FP8Callback(recipe, interval=2), convert=False)
    through.train()
    resumed = trainer_of(tmp_path / "resumed", FP8Callback(recipe, interval=2), seed=1, convert=False)
    assert isinstance(resumed.model.model.layers[0].self_attn.q_proj, octavo.nn.Linear)
    resumed.train(resume_from_checkpoint=str(tmp_path / "through/checkpoint-3"))
    assert losses_of(resumed) == losses_of(through)
    for one, other in zip(resumed.model.parameters(), through.model.parameters(), strict=True):
        assert torch.equal(one, other)
    state, same = octavo.scaling_state(resumed.model), octavo.scaling_state(through.model)
    assert state.keys() == same.keys()
    assert all(torch.equal(state[key], same[key]) for key in same)
    assert through.state.log_history[0]["fp8/nonfinite"] == 0
    assert (tmp_path / "through/metrics.jsonl").is_file()
    if recipe == "delayed":
        histories = [value.max().item() for key, value in same.items() if key.endswith(".weight.amax_history")]
        last = [line for line in through.state.log_history if "loss" in line][-1]
        assert (last["fp8/weight_amax_min"], last["fp8/weight_amax_max"]) == (min(histories), max(histories))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_numbers_reach_the_trainers_loggers(tmp_path, monkeypatch, recipe):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    callback = FP8Callback(recipe, interval=1, tensors=2)
    trainer = trainer_of(tmp_path / "run", callback, convert=False, steps=2, report_to="tensorboard")
    trainer.train()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    names = [name for name in lines[0] if name.startswith("fp8/")]
    assert len(names) == 1 + 3 * (2 + 2)  # nonfinite; of each role the range and two tensors
    for name in names:
        read = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert read == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]
    layers = dict(trainer.model.named_modules())
    weights = [name.removeprefix("fp8/amax/").removesuffix(".weight") for name in names if name.endswith(".weight")]
    assert all(isinstance(layers[path], octavo.nn.Linear) for path in weights)
    assert lines[0]["fp8/weight_amax_max"] == lines[0][f"fp8/amax/{weights[0]}.weight"]


def test_tensors_with_nonfinite_elements_are_named_up_to_a_bound():
    model = torch.nn.Sequential(*(octavo.nn.Linear(16, 16) for _ in range(4)))
    numbers = FP8Numbers(2)
    model(torch.full((1, 16), float("nan"))).sum().backward()
    assert numbers.of(model, None)["fp8/nonfinite"] == 4 * 16  # each layer's input
    assert [name for name in numbers.of(model, None) if "/nonfinite/" in name] == [
        "fp8/nonfinite/0.input", "fp8/nonfinite/1.input",
    ]  # fmt: skip
