"""What ``FP8Callback`` converts in a Trainer: other layers than ``nn.Linear``, and fresh models of ``model_init``."""

import pytest
import torch

import octavo

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from octavo.compat.huggingface import FP8Callback  # noqa: E402 (needs transformers)
from octavo.doctor.series import CastKey  # noqa: E402
from octavo.doctor.statistics import CAST_FIELDS  # noqa: E402
from octavo.errors import ConfigError  # noqa: E402
from octavo.scaling import ROLES  # noqa: E402
from tests.tiny_llama import TinyTexts, tiny_hugging_face_config  # noqa: E402

CONV1D = "transformer.h.0.mlp.c_fc"


def settings_of(folder, **changes):
    fixed = {
        "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 0.01, "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_steps": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder), **(fixed | changes))


def trainer_of(folder, callback, *, changes=None, **model):
    settings = settings_of(folder, **(changes or {}))
    return transformers.Trainer(args=settings, train_dataset=TinyTexts(), callbacks=[callback], **model)


def gpt2():
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(tiny_hugging_face_config(vocab_size=32, num_hidden_layers=1))


def losses_of(trainer):
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_gpt2_trains_and_its_conv1d_layers_are_watched(tmp_path, recipe):
    options = {"changes": {"max_steps": 2, "save_strategy": "no"}}
    callback = FP8Callback(recipe, interval=1, tensors=8)
    trainer = trainer_of(tmp_path / "callback", callback, model=gpt2(), **options)
    trainer.train()
    converted = gpt2()
    octavo.convert(converted, recipe)
    plain = trainer_of(tmp_path / "plain", FP8Callback(None, interval=0), model=converted, **options)
    plain.train()
    assert losses_of(trainer) == losses_of(plain)
    assert callback.doctor is not None
    assert callback.doctor.watcher is not None
    line, sample = trainer.state.log_history[1], callback.doctor.watcher.samples[1]
    for role in ROLES:
        amax = line[f"fp8/amax/{CONV1D}.{role}"]
        if recipe == "delayed":
            assert amax == octavo.scaling_state(trainer.model)[f"{CONV1D}.fp8_weight.{role}.amax_history"].max()
        else:
            gemm = "grad_input" if role == "grad_output" else "output"
            assert amax == sample.casts[CastKey(CONV1D, role, gemm)][CAST_FIELDS.index("amax")]
    assert sum(name.startswith("fp8/amax/") for name in line) == 4 * len(ROLES), "one name a tensor"


@pytest.mark.long
@pytest.mark.parametrize("restore", [False, True], ids=["of the caller", "restored by the Trainer"])
def test_each_model_of_model_init_is_converted_before_it_trains(tmp_path, restore):
    callback = FP8Callback("delayed", interval=2)
    trainer = trainer_of(tmp_path / "through", callback, model_init=llama)
    trainer.train()
    first, states = trainer.model, octavo.scaling_state(trainer.model)
    losses = losses_of(trainer)
    transformers.set_seed(42)  # the Trainer's default, before each call of model_init
    given = trainer_of(tmp_path / "given", FP8Callback("delayed", interval=2), model=llama())
    given.train()
    assert losses == losses_of(given)
    trainer.train()
    assert trainer.model is not first
    assert losses_of(trainer) == losses, "a fresh model begins without the scales of the one before"
    assert callback.report is not None
    assert callback.report.converted
    resumed = trainer_of(
        tmp_path / "resumed",
        FP8Callback("delayed", interval=2),
        model_init=llama,
        changes={"restore_callback_states_from_checkpoint": restore},
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "through/checkpoint-2"))
    assert losses_of(resumed) == losses
    same = octavo.scaling_state(resumed.model)
    assert same.keys() == states.keys()
    assert all(torch.equal(same[key], states[key]) for key in same)


@pytest.mark.filterwarnings("ignore:convert changed nothing")
def test_callback_that_converts_nothing_is_refused_with_the_reason(tmp_path):
    callback = FP8Callback(skip=["*"])
    with pytest.raises(ConfigError, match=r"FP8Callback converts no layer of this model; .*report says why"):
        trainer_of(tmp_path, callback, model=llama())
    assert callback.report is not None
    assert callback.report.skipped["model.layers.0.mlp.up_proj"] == "skip pattern '*'"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "nosuch"}, "there is no recipe 'nosuch'; use one of"),
        ({"tensors": -1}, "FP8Callback's tensors must be a whole number of at least 0, not -1"),
        ({"tensors": 1.5}, "FP8Callback's tensors must be a whole number of at least 0, not 1.5"),
        ({"interval": -1}, "FP8Callback's interval must be a whole number of at least 0, not -1"),
        ({"interval": True}, "FP8Callback's interval must be a whole number of at least 0, not True"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused_at_construction(options, words):
    with pytest.raises(ConfigError, match=words):
        FP8Callback(**options)


def test_nonfinite_elements_in_training_are_in_the_logs(tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] = float("inf")  # the norm after it makes NaN of the whole row
    changes = {"max_steps": 1, "save_strategy": "no"}
    trainer = trainer_of(tmp_path, FP8Callback(interval=0, tensors=1), model=model, changes=changes)
    trainer.train()
    counts, line = octavo.nonfinite_counts(trainer.model), trainer.state.log_history[0]
    assert line["fp8/nonfinite"] == sum(counts.values()) > 0
    first = next(iter(counts))
    assert line[f"fp8/nonfinite/{first}"] == counts[first]
