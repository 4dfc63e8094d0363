"""Options that several commands share mean the same in all of them."""

import pytest
import torch

from octavo.cli.options import device_of
from octavo.errors import ConfigError
from octavo.training.config import Device

COMMANDS = [
    ["calibrate", "nowhere.gguf", "--out", "out"],
    ["qat", "nowhere.gguf", "--out", "out"],
    ["sensitivity", "nowhere.gguf", "--out", "out"],
    ["export", "nowhere.gguf", "--out", "out"],
    ["eval", "nowhere.gguf"],
    ["eval", "nowhere.gguf", "--compare", "bf16"],
]


def test_a_device_is_one_of_three_words():
    assert (device_of(None), device_of("cpu")) == (Device.AUTO, Device.CPU)
    for word in ("tpu", ""):
        with pytest.raises(ConfigError, match="device must be one of auto, cpu, cuda"):
            device_of(word)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("device", "words"), [("cuda", "torch sees no CUDA device"), ("tpu", "device must be one of")])
def test_every_command_over_a_model_takes_a_device(octavo, monkeypatch, tmp_path, *, command, device, words):
    """And refuses one that is not there before it reads anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = octavo(*command, "--device", device)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []
