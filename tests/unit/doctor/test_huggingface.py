"""The callback in a real ``transformers.Trainer`` on a tiny Llama: what it writes, says, and leaves behind."""

import dataclasses
import json
import re

import pytest
import torch
from typer.testing import CliRunner

import octavo
from octavo.cli.app import app
from octavo.doctor import diagnose, series_of
from octavo.doctor.metrics_lines import read_lines
from octavo.errors import ConfigError
from octavo.nn import Linear

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from transformers import TrainerCallback  # noqa: E402

from octavo.doctor.huggingface import DoctorCallback  # noqa: E402 (needs transformers)
from tests.tiny_llama import TinyTexts, tiny_hugging_face_config  # noqa: E402

STEPS, MICRO_BATCHES, INTERVAL = 5, 2, 2


def tiny_model(**conversion):
    torch.manual_seed(0)
    config = tiny_hugging_face_config(vocab_size=32, num_hidden_layers=1)
    model = transformers.LlamaForCausalLM(config)
    octavo.convert(model, "tensorwise", **conversion)
    return model


def trainer_of(model, folder, callback, **changes):
    arguments = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": MICRO_BATCHES,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": STEPS, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    settings = transformers.TrainingArguments(output_dir=str(folder), **(arguments | changes))
    return transformers.Trainer(
        model=model, args=settings, train_dataset=TinyTexts(), eval_dataset=TinyTexts(), callbacks=[callback]
    )


@dataclasses.dataclass
class Trained:
    folder: object
    callback: DoctorCallback
    model: torch.nn.Module
    told: list[str]
    lines: list[dict]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A head in FP8, which is one finding from the first look on."""
    folder = tmp_path_factory.mktemp("output")
    told: list[str] = []
    callback, model = DoctorCallback(interval=INTERVAL, tell=told.append), tiny_model(convert_head=True)
    trainer_of(model, folder, callback).train()
    return Trained(folder, callback, model, told, read_lines(folder / "metrics.jsonl"))


def command(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def steps_of(lines, kind):
    return [line["step"] for line in lines if line["kind"] == kind]


def test_steps_follow_the_optimizer_and_samples_follow_the_interval(trained):
    assert steps_of(trained.lines, "step") == [1, 2, 3, 4, 5]
    assert steps_of(trained.lines, "statistics") == [1, 2, 4]
    assert steps_of(trained.lines, "watched") == [1]
    assert steps_of(trained.lines, "evaluation") == [5]


def test_numbers_are_the_trainer_s(trained):
    step = next(line for line in trained.lines if line["kind"] == "step")
    assert step["loss"] == pytest.approx(3.47, abs=0.1)  # log(32)
    assert step["lr"] > 0
    assert step["grad_norm"] > 0


def test_every_layer_its_products_and_the_update_are_measured(trained):
    series = series_of(trained.lines)
    converted = {path for path, module in trained.model.named_modules() if isinstance(module, Linear)}
    assert len(converted) == 8
    assert {key.path for key in series.casts.keys} == converted
    assert len(series.products.keys) == 3 * len(converted)
    assert len(series.parameters.keys) == len(converted) + 1  # and the embedding
    assert (series.parameters.of("update_ratio") > 0).all()  # the optimizer that accelerate wraps was seen


def test_finding_is_printed_once_and_recorded_in_the_file(trained):
    (told,) = [line for line in trained.told if "sensitive-module" in line]
    assert told.startswith("octavo doctor: warn: sensitive-module at lm_head")
    assert [finding.code for finding in trained.callback.findings()] == ["sensitive-module"]


def test_the_model_is_left_unwatched(trained):
    assert all(module.watch is None for module in trained.model.modules() if isinstance(module, Linear))


def test_the_command_reads_the_output_folder(trained):
    result = command("doctor", trained.folder, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["step"], found["samples"], found["layers"]) == (5, 3, 8)
    assert [finding["code"] for finding in found["findings"]] == ["sensitive-module"]


def test_a_reference_has_the_settings_of_the_run(trained, tmp_path):
    """The same but for its precision is compared, with its evaluations; another seed, rate or batch is refused."""
    changes = {"same": {}, "other": {"seed": 3}}
    for name, change in changes.items():
        model = tiny_model(convert_head=True, overrides={"*": "bf16"})
        trainer_of(model, tmp_path / name, DoctorCallback(interval=INTERVAL), **change).train()
    compared = command("doctor", trained.folder, "--against", tmp_path / "same")
    assert compared.exit_code == 0, compared.output
    words = " ".join(compared.stdout.split())
    assert re.search(r"averaged over steps 4-5; held out, [\d.e-]+ nats (above|below) ", words)
    assert "is not known" not in words
    refused = command("doctor", trained.folder, "--against", tmp_path / "other")
    assert refused.exit_code == 2
    assert "is no reference: it has seed = 3, not 42; train one with" in " ".join(refused.stderr.split())
    (tmp_path / "other" / "trainer_settings.json").unlink()
    unknown = command("doctor", trained.folder, "--against", tmp_path / "other").stdout
    assert "whether their settings are the same is not known" in " ".join(unknown.split())


def test_a_resumed_training_cuts_off_the_steps_that_it_makes_again(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "no"}
    trainer_of(tiny_model(), tmp_path, DoctorCallback(interval=2), **saving).train()
    first = read_lines(tmp_path / "metrics.jsonl")
    resumed = trainer_of(tiny_model(), tmp_path, DoctorCallback(interval=2), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    again = read_lines(tmp_path / "metrics.jsonl")
    assert steps_of(again, "step") == [1, 2, 3, 4, 5]
    assert steps_of(again, "statistics") == [1, 2, 4]
    assert steps_of(again, "watched") == [1]
    assert [line for line in again if line["step"] <= 3] == [line for line in first if line["step"] <= 3]


def test_step_skipped_by_the_loss_scale_is_recorded_in_the_file(tmp_path):
    model, callback = tiny_model(), DoctorCallback(interval=INTERVAL)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    state, control = transformers.TrainerState(is_world_process_zero=True), transformers.TrainerControl()
    told = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]), state, control
    callback.on_train_begin(*told, model=model, optimizer=optimizer)
    for step in range(3):
        callback.on_step_begin(*told)
        ids = TinyTexts()[step]["input_ids"][None]
        scaler.scale(model(input_ids=ids, labels=ids).loss * (torch.inf if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state.global_step += 1
        callback.on_step_end(*told)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line for line in lines if line["kind"] == "overflow"] == [
        {"kind": "overflow", "step": 2, "loss_scale": None}
    ]
    assert not [one for one in callback.findings() if one.code == "nonfinite"]
    assert not [one for one in diagnose(series_of(lines)) if one.code == "nonfinite"]


def test_a_loss_that_is_no_number_is_found_while_it_trains_and_afterwards(tmp_path):
    """JSON has no NaN: the file says null, and both readers take it for what it was."""
    model, callback = tiny_model(), DoctorCallback(interval=INTERVAL)
    state, control = transformers.TrainerState(is_world_process_zero=True), transformers.TrainerControl()
    told = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]), state, control
    callback.on_train_begin(*told, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for loss in (3.0, 2.9, float("nan"), float("inf"), float("nan")):
        state.global_step += 1
        callback.on_log(*told, logs={"loss": loss, "learning_rate": 0.1})
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["loss"] for line in lines] == [3.0, 2.9, None, None, None]
    for findings in (callback.findings(), diagnose(series_of(lines))):
        assert [(one.code, one.first_step, one.last_step) for one in findings] == [("nonfinite", 3, 5)]
        assert "the loss is NaN or ±Inf since step 3" in findings[0].cause


class Spoiled(Exception):  # noqa: N818 (nothing of octavo's)
    pass


def interrupted(folder, callback, model, *, step):
    """A training that an exception ends in the forward pass of a step's second micro-batch."""
    calls = []

    def spoil(_module, _inputs):
        calls.append(1)
        if len(calls) == MICRO_BATCHES * step:
            raise Spoiled

    handle = model.register_forward_pre_hook(spoil)
    with pytest.raises(Spoiled):
        trainer_of(model, folder, callback, eval_strategy="no").train()
    handle.remove()


def is_watched(model):
    return any(module.watch is not None for module in model.modules() if isinstance(module, Linear))


def stance():
    return torch._dynamo.eval_frame._stance.stance


def test_sample_interrupted_by_an_exception_can_be_abandoned(tmp_path):
    callback, model = DoctorCallback(interval=2), tiny_model()
    interrupted(tmp_path, callback, model, step=2)
    assert is_watched(model)
    assert stance() == "force_eager"
    callback.abandon()
    callback.abandon()
    assert not is_watched(model)
    assert stance() == "default"
    assert steps_of(read_lines(tmp_path / "metrics.jsonl"), "statistics") == [1]


def test_training_after_an_interrupted_one_records_only_its_own_samples(tmp_path):
    callback, first, second = DoctorCallback(interval=2), tiny_model(), tiny_model()
    interrupted(tmp_path, callback, first, step=2)
    trainer_of(second, tmp_path, callback, eval_strategy="no").train()
    assert not is_watched(first)
    assert not is_watched(second)
    assert stance() == "default"
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert steps_of(lines, "statistics") == [1, 2, 4]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_training_goes_on_where_lines_cannot_be_written(tmp_path, is_there):
    """A folder stands where the file belongs: from the beginning, or from the first finding on."""
    told: list[str] = []
    metrics = tmp_path / "output" / "metrics.jsonl"

    def tell(line):
        told.append(line)
        metrics.unlink(missing_ok=True)
        metrics.mkdir()

    if is_there:
        metrics.mkdir(parents=True)
    callback = DoctorCallback(interval=2, tell=told.append if is_there else tell)
    trainer = trainer_of(tiny_model(convert_head=True), tmp_path / "output", callback, eval_strategy="no")
    with pytest.warns(UserWarning, match=r"DoctorCallback writes no more lines: .*metrics.jsonl") as caught:
        trainer.train()
    assert trainer.state.global_step == STEPS
    assert len([one for one in caught if "DoctorCallback" in str(one.message)]) == 1
    assert any("sensitive-module" in line for line in told)


def test_a_model_that_is_not_converted_is_refused(tmp_path):
    model = tiny_model()
    octavo.restore(model)
    with pytest.raises(ConfigError, match=r"call octavo\.convert"):
        trainer_of(model, tmp_path, DoctorCallback()).train()


@pytest.mark.parametrize("arguments", [{"interval": 0}, {"keep": 1}])
def test_numbers_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigError, match="must be a whole number of at least"):
        DoctorCallback(**arguments)


def test_a_step_without_a_beginning_is_refused():
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    with pytest.raises(ConfigError, match="was not notified of the start"):
        DoctorCallback().on_step_begin(transformers.TrainingArguments(), state, control)


class RememberedLosses(TrainerCallback):
    """Losses of all steps, from the forward passes themselves: a mean over the tokens of both micro-batches."""

    def __init__(self, model):
        self.sums, self.losses = [], []
        model.register_forward_hook(self.remember, with_kwargs=True)

    def remember(self, model, _inputs, kwargs, outputs):
        if model.training:
            logits, labels = outputs.logits[:, :-1].detach().double(), kwargs["labels"][:, 1:]
            nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            self.sums.append((nats.item(), labels.numel()))

    def on_step_end(self, *_event, **_given):
        self.losses.append(sum(nats for nats, _ in self.sums) / sum(tokens for _, tokens in self.sums))
        self.sums.clear()


@pytest.mark.parametrize(("logging_steps", "interval"), [(1, 2), (3, 2), (10, 2), (10, 100)])
def test_the_loss_and_the_rate_of_every_step_are_recorded_whenever_the_trainer_logs(tmp_path, logging_steps, interval):
    model, callback = tiny_model(), DoctorCallback(interval=interval)
    rates, remembered = [], RememberedLosses(model)
    trainer = trainer_of(
        model, tmp_path, callback, logging_steps=logging_steps, eval_strategy="no", learning_rate=0.1, max_steps=7
    )
    trainer.add_callback(remembered)
    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(lambda one, *_: rates.append(one.param_groups[0]["lr"]))
    trainer.train()
    lines = read_lines(tmp_path / "metrics.jsonl")
    written = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in written] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["loss"] for line in written] == pytest.approx(remembered.losses, rel=1e-5)
    assert [line["lr"] for line in written] == rates
    assert [line["step"] for line in written if "grad_norm" in line] == list(range(logging_steps, 8, logging_steps))
    assert callback.watcher is not None
    for series in (series_of(lines), callback.watcher.series()):
        assert series.curve("loss")[0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert "training_step" not in vars(trainer)


def test_losses_are_read_from_the_device_only_at_samples_and_logs(tmp_path, monkeypatch):
    reads, genuine = [], DoctorCallback._write_until

    def write_until(callback, step):
        reads.append(step)
        genuine(callback, step)

    monkeypatch.setattr(DoctorCallback, "_write_until", write_until)
    callback = DoctorCallback(interval=4)
    trainer_of(tiny_model(), tmp_path, callback, logging_steps=6, eval_strategy="no", max_steps=11).train()
    assert reads == [0, 3, 6, 7, 11]  # samples of steps 1, 4 and 8, a log at step 6, the end
