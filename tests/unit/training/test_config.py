"""Configurations: TOML and back, and every kind of mistake by name."""

import math
import typing
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from octavo.errors import ConfigError
from octavo.models import Llama
from octavo.training.config import (
    DataConfig,
    ModelConfig,
    Precision,
    RunConfig,
    TrainingConfig,
    config_from_dict,
    demo_config,
    load_config,
    save_config,
)

UNUSUAL = RunConfig(
    model=ModelConfig(hidden_size=64, num_heads=2, tie_embeddings=True, rms_norm_eps=1e-6),
    data=DataConfig(source="a b/ü.txt", vocab_size=999),
    training=TrainingConfig(
        recipe="delayed", recipe_options={"history_length": 4, "statistic": "mean"}, precision=Precision.FP32,
        skip=("*.q_proj", "*.k_proj"), betas=(0.8, 0.99), lr=1e-4, min_lr=0.0, eval_interval=0,
        overrides={"model.layers.3.mlp.down_proj": "bf16", "*.up_proj": "rowwise"}, cache_weights=True,
        convert_head=True, precision_schedule=(("bf16", 0.0), ("rowwise", 0.25)), autopilot=True,
    ),
)  # fmt: skip


@pytest.mark.parametrize("config", [RunConfig(), UNUSUAL])
def test_config_round_trips_through_toml(tmp_path, config):
    save_config(config, tmp_path / "run.toml")
    assert load_config(tmp_path / "run.toml") == config


def test_empty_file_gives_the_defaults(tmp_path):
    (tmp_path / "run.toml").write_text("")
    assert load_config(tmp_path / "run.toml") == RunConfig()


MISTAKES = {
    "[model]\nhiden_size = 4": r"section \[model\] has no key 'hiden_size' \(did you mean 'hidden_size'\?\)",
    "[modle]\n": r"configuration has no key 'modle' \(did you mean 'model'\?\); it takes model, data, training",
    "model = 3": "model must be a section of keys, not 3",
    "[training]\nsteps = 1.5": "training.steps must be a whole number, not 1.5",
    "[training]\nsteps = true": "training.steps must be a whole number, not True",
    "[training]\nlr = '1e-3'": "training.lr must be a number, not '1e-3'",
    "[training]\nlr = nan": "training.lr must be a positive number, not nan",
    "[training]\nmin_lr = inf": "training.min_lr must be at least 0, not inf",
    "[training]\nmin_lr = 1": r"training.min_lr must be at most lr \(0.003\), not 1.0",
    "[training]\nadjust_for_fp8 = 1": "training.adjust_for_fp8 must be true or false, not 1",
    "[training]\nrecipe = 'tensor'": r"one of fp32, bf16, tensorwise, .*, not 'tensor' \(did you mean 'tensorwise'",
    "[training]\nprecision = 'fp8'": "training.precision must be one of fp32, bf16, fp16, not 'fp8'",
    "[training]\nloss_scale = 'none'": "training.loss_scale must be auto, dynamic or a number, not 'none'",
    "[training]\nloss_scale = 'dynamical'": r"not 'dynamical' \(did you mean 'dynamic'\?\)",
    "[training]\nloss_scale = 0": "training.loss_scale must be a positive number, not 0",
    "[training]\nloss_scale = nan": "training.loss_scale must be a positive number, not nan",
    "[training]\nloss_scale = true": "training.loss_scale must be a number, not True",
    "[training]\ndevice = 'gpu'": "training.device must be one of auto, cpu, cuda, not 'gpu'",
    "[training]\nbetas = [0.9]": r"training.betas must be two numbers from 0 to under 1, not \[0.9\]",
    "[training]\nbetas = [0.9, 1.0]": "training.betas must be two numbers",
    "[training]\nbetas = 0.9": "training.betas must be a list, not 0.9",
    "[training]\nskip = 'lm_head'": "training.skip must be a list, not 'lm_head'",
    "[training]\nskip = [1]": "training.skip\\[0\\] must be a string, not 1",
    "[training]\noverrides = ['*']": r"training.overrides must be a table, not \['\*'\]",
    "[training.overrides]\n'*.q_proj' = 3": r"training.overrides.\*.q_proj must be a string, not 3",
    "[training.overrides]\n'*' = 'rowwize'": r"training.overrides\['\*'\] must be one of bf16, .*'rowwise'\?\)",
    "[training.overrides]\n'*' = 'fp32'": r"training.overrides\['\*'\] must be one of bf16, tensorwise, .*not 'fp32'",
    "[training.overrides]\n'*' = 'static'": r"training.overrides\['\*'\] must be one of .*not 'static'",
    "[training.overrides]\n'' = 'bf16'": "training.overrides has the pattern ''; name layers",
    "[training]\nconvert_head = 'yes'": "training.convert_head must be true or false, not 'yes'",
    "[training]\nsteps = 0": "training.steps must be at least 1, not 0",
    "[training]\nwarmup = -1": "training.warmup must be at least 0, not -1",
    "[training]\nrecipe = 'delayed'\n[training.recipe_options]\nmargin = -1": "margin must be .* at least 0, not -1",
    "[training]\nrecipe = 'fp32'\n[training.recipe_options]\nmargin = 1": "'fp32' has no option 'margin'",
    "[data]\nvocab_size = 100": "data.vocab_size must be at least 257, not 100",
    "[data]\nsource = ''": "data.source is empty",
    "[model]\nnum_kv_heads = 3": "3 does not divide 4",
    "steps = ": "is not TOML",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_named(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=MISTAKES[text]) as caught:
        load_config(tmp_path / "run.toml")
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*No such file"):
        load_config(tmp_path / "no.toml")


def test_whole_numbers_are_accepted_as_numbers():
    assert config_from_dict({"training": {"clip_norm": 1}}).training.clip_norm == 1.0


def test_config_is_immutable():
    with pytest.raises(FrozenInstanceError):
        RunConfig().training.steps = 3  # type: ignore[misc]
    before = RunConfig()
    assert before.with_training(steps=3).training.steps == 3
    assert before == RunConfig()


def test_hash_changes_with_every_key_that_matters():
    one = RunConfig().config_hash()
    free = {"log", "checkpoint_interval", "keep_checkpoints", "async_checkpoints", "statistics_interval"}
    special = {
        "recipe": "bf16", "skip": ("x",), "device": "cpu", "precision": "fp32", "loss_scale": "dynamic",
        "adjust_for_fp8": True, "betas": (0.5, 0.6), "min_lr": 1e-5, "overrides": {"*.q_proj": "bf16"}, "log": (),
        "convert_head": True, "cache_weights": True, "precision_schedule": (("fp8", 0.0),), "autopilot": True,
        "moments": "fp8", "gradient_jumps": ((0.5, 3),), "cast_norms": True, "smooth_swiglu": True,
        "as_served_by": "vllm-block",
    }  # fmt: skip
    for field in fields(TrainingConfig):
        if field.name == "recipe_options":
            changed = RunConfig().with_training(recipe="delayed", recipe_options={"margin": 1})
        else:
            value: typing.Any = special.get(field.name, (getattr(RunConfig().training, field.name) or 3) * 2)
            changed = RunConfig().with_training(**{field.name: value})
        assert (changed.config_hash() == one) == (field.name in free), field.name
    orders = [{"*.q_proj": "bf16", "*": "rowwise"}, {"*": "rowwise", "*.q_proj": "bf16"}]
    assert len({RunConfig().with_training(overrides=order).config_hash() for order in orders}) == 2, "the first counts"
    assert replace(RunConfig(), data=DataConfig(source="x")).config_hash() != one
    assert replace(RunConfig(), model=ModelConfig(num_layers=5)).config_hash() != one
    assert replace(RunConfig(), model=ModelConfig(qk_norm=True)).config_hash() != one


def test_hash_of_an_older_run_stays():
    """As version 0.1 wrote it, before the keys [parallel] and those of later studies."""
    assert RunConfig().config_hash() == "9b6a4d76e397dbd15facd909ca6e99a9"


def test_recipe_determines_surrounding_precision_and_loss_scale():
    def training(recipe, **changes):
        return TrainingConfig(recipe=recipe, lr=1.0, warmup=10, min_lr=0.0, **changes)

    assert [str(training(r).surrounding) for r in ("fp32", "bf16", "rowwise")] == ["fp32", "bf16", "bf16"]
    assert all(training("rowwise", precision=precision).surrounding == precision for precision in Precision)
    assert training("bf16", precision=Precision.FP16).surrounding == Precision.BF16
    assert [training("rowwise", precision=precision).scales_loss for precision in Precision] == [False, False, True]
    assert all(training("fp32", loss_scale=scale).scales_loss for scale in ("dynamic", 1.0, 1024.0))
    assert (training("rowwise").peak_lr, training("rowwise").warmup_steps) == (1.0, 10)
    adjusted = training("rowwise", adjust_for_fp8=True)
    assert (adjusted.peak_lr, adjusted.warmup_steps) == (0.85, 15)
    assert training("bf16", adjust_for_fp8=True).peak_lr == 1.0
    assert training("bf16", batch_size=3, context=5, grad_accumulation=7).tokens_per_step == 105


def test_model_section_takes_vocabulary_and_context():
    llama = ModelConfig().llama(vocab_size=77, max_positions=9)
    assert (llama.vocab_size, llama.max_positions, llama.hidden_size) == (77, 9, 128)
    assert math.isclose(llama.rms_norm_eps, 1e-5)


def test_demo_presets():
    full, quick = demo_config(), demo_config(quick=True)
    assert full.model == quick.model
    assert full.data == quick.data == DataConfig(source="builtin", vocab_size=2048)
    shape = full.model.llama(vocab_size=2048, max_positions=full.training.context)
    parameters = sum(p.numel() for p in Llama(shape).parameters())
    assert 1_000_000 < parameters < 4_000_000
    assert (
        quick.training.steps * quick.training.tokens_per_step < full.training.steps * full.training.tokens_per_step / 8
    )


@pytest.mark.parametrize(("name", "value"), [("threads", 100_000), ("seed", 10**23)])
def test_numbers_that_the_machine_cannot_hold_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"training.{name} must be at most"):
        TrainingConfig(**{name: value})


def test_misspelled_enum_value_is_suggested_as_written():
    with pytest.raises(ConfigError, match=r"\(did you mean 'cpu'\?\)"):
        config_from_dict({"training": {"device": "cpus"}})
