"""Accelerators by their published names, and their figures against what they are made of."""

import re
import time

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.planning.hardware import find_hardware, hardware_names
from octavo.planning.this_cpu import measure_cpu


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
        ("A800-SXM4-80GB", "a800"),
        ("H100 (vs A100)", "h100"),
        ("B200", "b200"),
        ("B200 192GB", "b200"),  # memory may be rounded; bits and speeds are none
        ("H100 80GB, 400Gb/s RDMA", "h100"),
        ("H100, NVLink 900 GB/s", "h100"),
        ("B300 288GB", "b300"),
    ],
)
def test_a_name_has_figures_of_its_own(text, name):
    assert find_hardware(text).name == name


@pytest.mark.parametrize("text", ["h1000", "my b2000", "l400"])
def test_a_name_that_goes_on_is_another(text):
    with pytest.raises(ConfigError, match="no figures are known"):
        find_hardware(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("H100→B200", "names one accelerator and then another; give the one that was measured"),
        ("H100 -> B200", "names one accelerator and then another"),
        ("H100 64GB HBM2", "no figures are known for 'H100 64GB HBM2'; h100 has 80 GB"),
        ("V100 16 GB", "v100 has 32 GB"),
    ],
)
def test_a_name_of_two_or_of_other_memory_is_refused(text, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        find_hardware(text)


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


def test_board_power_of_datasheets():
    """Watts, the most that a vendor allows: what energy is multiplied by. A card that is added needs its own."""
    watts = {"v100": 300, "a100": 400, "a100-40gb": 400, "a800": 400, "l4": 72, "l40": 300, "l40s": 350}
    watts |= {"rtx-4090": 450, "rtx-6000-ada": 300}
    watts |= {"h100": 700, "h100-96gb": 700, "h100-nvl": 400, "h100-pcie": 350, "h800": 700, "h20": 400}
    watts |= {"h200": 700, "h200-nvl": 600, "gh200": 700, "gh200-144gb": 700}
    watts |= {"b100": 700, "b200": 1000, "gb200": 1200, "b300": 1100, "gb300": 1400}
    watts |= {"mi300a": 550, "mi300x": 750, "mi325x": 1000, "mi350x": 1000, "mi355x": 1400}
    assert {name: find_hardware(name).watts for name in hardware_names()} == watts


@pytest.mark.parametrize(
    ("name", "links", "rate"),
    [
        ("v100", 6, 25),  # NVLink 2: 25 GB/s a link and direction
        ("a100", 12, 25),
        ("a800", 8, 25),
        ("h800", 8, 25),
        ("h100", 18, 25),
        ("h200", 18, 25),
        ("b200", 18, 50),  # NVLink 5
        ("gb200", 18, 50),
        ("b300", 18, 50),
        ("mi300x", 7, 64),  # Infinity Fabric: one link to each of seven others, 32 Gb/s on 16 lanes
        ("mi325x", 7, 64),
        ("mi350x", 7, 76.8),  # 38.4 Gb/s
        ("mi355x", 7, 76.8),
        ("l40s", 1, 32),  # PCIe 4 of 16 lanes
        ("h100-pcie", 1, 64),  # PCIe 5
    ],
)
def test_links_are_as_many_as_there_are_times_their_rate(name, links, rate):
    assert find_hardware(name).link == pytest.approx(links * rate, abs=1)


def test_mx_formats_are_multiplied_where_they_are():
    """Blackwell's tcgen05 and CDNA4's MFMA have block scales; Hopper's, Ada's and CDNA3's have none."""
    having = {name for name in hardware_names() if find_hardware(name).has_mx}
    assert having == {"b100", "b200", "gb200", "b300", "gb300", "mi350x", "mi355x"}


@pytest.mark.long
def test_the_bandwidth_of_this_cpu_is_what_a_copy_reaches():
    """Bytes that NumPy reads and writes in a second; beside other programs both vary."""
    source = np.ones(1 << 24, dtype=np.float32)
    target = np.empty_like(source)
    rates = []
    for _ in range(5):
        np.copyto(target, source)
        started = time.perf_counter()
        np.copyto(target, source)
        rates.append(2 * source.nbytes / (time.perf_counter() - started) / 1e9)
    found = max(measure_cpu().bandwidth for _ in range(4))
    assert max(rates) / 5 < found < 2.5 * max(rates)


@pytest.mark.parametrize(
    "text", ["H100 (350 W limit)", "H100 350W cap", "H100 350 W power limit", "H100 capped at 350W"]
)
def test_a_power_limit_is_followed(text):
    assert find_hardware(text).watts == 350
    assert find_hardware(text).bf16 < find_hardware("H100").bf16


def test_an_unknown_one_is_refused():
    with pytest.raises(ConfigError, match="no figures are known"):
        find_hardware("vs H100")
