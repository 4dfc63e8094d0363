"""Accelerators by their published names."""

import pytest

from octavo.errors import ConfigError
from octavo.planning.hardware import find_hardware


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA L40", "l40"),
        ("L40S", "l40s"),
        ("B100", "b100"),
        ("MI300A", "mi300a"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("RTX 4090", "rtx-4090"),
        ("GH200 144GB", "gh200-144gb"),
        ("GH200", "gh200"),
        ("A100 vs H100", "a100"),
        ("H100 (vs A100)", "h100"),
        ("B200", "b200"),
    ],
)
def test_a_name_has_figures_of_its_own(text, name):
    assert find_hardware(text).name == name


def test_figures_of_datasheets():
    """TFLOP/s of dense BF16 and FP8, GB and GB/s."""
    figures = {
        "l40": (181, 362, 48, 864),
        "l40s": (362, 733, 48, 864),
        "mi300a": (980.6, 1961.2, 128, 5300),
        "b100": (1750, 3500, 180, 7700),
        "gh200-144gb": (989.4, 1978.9, 144, 4900),
    }
    for name, wanted in figures.items():
        found = find_hardware(name)
        assert (found.bf16, found.fp8, found.memory, found.bandwidth) == wanted


@pytest.mark.parametrize(
    "text", ["H100 (350 W limit)", "H100 350W cap", "H100 350 W power limit", "H100 capped at 350W"]
)
def test_a_power_limit_is_followed(text):
    assert find_hardware(text).watts == 350
    assert find_hardware(text).bf16 < find_hardware("H100").bf16


def test_an_unknown_one_is_refused():
    with pytest.raises(ConfigError, match="no figures are known"):
        find_hardware("vs H100")
