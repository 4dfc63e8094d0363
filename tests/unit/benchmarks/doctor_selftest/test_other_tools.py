import math

import pytest

from benchmarks.doctor_selftest.other_tools import ANOMALY, HUGGING_FACE, ToolAnswer, asking_others
from octavo.errors import NonFiniteLossError
from tests.unit.benchmarks.doctor_selftest.tiny_trainer import tiny_trainer


def broken_output(trainer):
    """An Inf in a norm's output, which the loss turns into NaN."""

    def break_one(_module, _inputs, output):
        broken = output.clone()
        broken[0, 0, 0] = math.inf
        return broken

    return trainer.model.model.layers[1].input_layernorm.register_forward_hook(break_one)


def test_both_speak_where_a_step_breaks_and_one_names_the_module(data):
    answers: dict[str, ToolAnswer] = {}
    with tiny_trainer(data) as trainer:
        before = {module: len(module._forward_hooks) for module in trainer.model.modules()}
        handle = broken_output(trainer)
        with pytest.raises(NonFiniteLossError), asking_others(trainer, answers):
            raise NonFiniteLossError("the loss is nan")
        handle.remove()
        assert {module: len(module._forward_hooks) for module in trainer.model.modules()} == before
    assert "returned nan values" in answers[ANOMALY].words
    if HUGGING_FACE in answers:
        assert answers[HUGGING_FACE].names("model.layers.1.input_layernorm")
        assert not answers[HUGGING_FACE].names("model.layers.0.input_layernorm")


def test_other_tools_report_nothing_on_a_healthy_step_and_leave_the_trainer_unchanged(data):
    answers: dict[str, ToolAnswer] = {}
    with tiny_trainer(data) as trainer:
        trainer.step = 5
        with asking_others(trainer, answers):
            pass
        assert trainer.step == 5
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert set(answers.values()) == {ToolAnswer("")}
    assert not ToolAnswer("").names("")
