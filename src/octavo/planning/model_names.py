"""Models by their published names, in whatever spelling: ``LLAMA3-70B SFT``, ``meta-llama/Llama-3.1-70B-Instruct``.

``models.toml`` has the shapes. A name without an entry but with a size ("13B", "30B-A3B") gets a shape of usual
proportions, which is right to about 10 % in time and is named ``like a … model``.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any

from octavo.errors import ConfigError
from octavo.parsing import parse_toml
from octavo.planning.model_shapes import ModelShape

__all__ = ["find_model", "model_names"]

# In this order; {0} is the pattern's first group. What is not here is looked up as it is written.
SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"mixtral-?(8x\d+b)", "mixtral-{0}"),
    (r"llama-?4.*(?:maverick|128e)", "llama-4-maverick"),
    (r"llama-?4", "llama-4-scout"),
    (r"nemotron-?nano-?v?2?-?(9|12)b", "nemotron-nano-{0}b"),
    (r"llama-?3(?:\.\d)?-(?:arch-)?(\d+(?:\.\d+)?b)", "llama-3-{0}"),
    (r"llama-?2-?(?:chat)?-?(70b)", "llama-2-{0}"),
    (r"llama-?[12]?-?(\d+b)", "llama-{0}"),
    (r"llama-?(?:3[.\d]*-\w+-)?(\d+b)", "llama-3-{0}"),
    (r"mistral-?(?:v[\d.]+)?-?nemo", "mistral-12b"),
    (r"mistral-?small", "mistral-24b"),
    (r"mistral-?large", "mistral-123b"),
    (r"qwen-?3-?next", "qwen-3-80b-a3b"),
    (r"qwen-?3-?moe-?(30)b", "qwen-3-30b-a3b"),
    (r"qwen-?3-?moe-?(235)b", "qwen-3-235b-a22b"),
    (r"qwen-?3[.\d]*-?(?:vl|coder|moe)?-?(\d+(?:\.\d+)?b(?:-a\d+b)?)", "qwen-3-{0}"),
    (r"qwen-?2[.\d]*-?(?:vl|coder|math)?-?(\d+(?:\.\d+)?b(?:-a\d+b)?)", "qwen-2-{0}"),
    (r"qwen-?(?:1\.5)?-?(\d+b)", "qwen-{0}"),
    (r"deepseek-?v?4-?flash", "deepseek-v4-flash"),
    (r"deepseek-?(?:coder-?)?v?2-?lite", "deepseek-v2-lite"),
    (r"deepseek-?(?:coder-?)?v2", "deepseek-v2"),
    (r"deepseek-?(?:v3|r1)", "deepseek-v3"),
    (r"deepseek-?v?1?-?(\d+b)", "deepseek-{0}"),
    (r"dsv3", "deepseek-v3"),
    (r"kimi-?k2", "kimi-k2"),
    (r"moonlight", "moonlight-16b-a3b"),
    (r"gemma-?3n?-?(\d+b)", "gemma-3-{0}"),
    (r"gemma-?2-?(9|27)b", "gemma-2-{0}b"),
    (r"gemma-?2-2b", "gemma-2-2b"),
    (r"gemma-?(\d+b)", "gemma-{0}"),
    (r"nemotron-?(?:v?3)-?nano|nemotron.*nano-?(?:v?3)", "nemotron-3-nano"),
    (r"nemotron-?(?:v?3)-?super|nemotron.*super-?(?:v?3|120b)", "nemotron-3-super"),
    (r"nemotron-?h-?(\d+b)", "nemotron-h-{0}"),
    (r"nemotron-?[34]?-?(\d+b)", "nemotron-{0}"),
    (r"gpt-?oss-?(\d+b)", "gpt-oss-{0}"),
    (r"gpt-?neox-?(20b)?", "gpt-neox-20b"),
    (r"gpt-?[23]?-?(\d+(?:\.\d+)?[bm])", "gpt-{0}"),
    (r"mpt-?(\d+[bm])", "mpt-{0}"),
    (r"grok", "grok-1-314b"),
    (r"phi-?(?:3|3\.5|4)-?mini", "phi-3-mini"),
    (r"phi-?3\.5-?moe", "phi-3.5-moe"),
    (r"phi-?[34]", "phi-14b"),
    (r"olmoe", "olmoe-7b"),
    (r"olmo-?[12]?(?:-\d{4})?-?(\d+b)", "olmo-{0}"),
    (r"falcon-?(\d+b)", "falcon-{0}"),
    (r"glm-?4\.[5-7].*(?:air|106b)", "glm-4.5-air"),
    (r"glm-?4\.[5-7]", "glm-4.5"),
    (r"glm-?4-?(9b)?", "glm-4-9b"),
    (r"hunyuan.*(a13b|80b)", "hunyuan-a13b"),
    (r"hunyuan", "hunyuan-large"),
    (r"(?:command-?r-?plus|command-?r\+|104b)", "command-r-104b"),
    (r"command-?r", "command-r-35b"),
    (r"dbrx", "dbrx-132b"),
    (r"bloom", "bloom-176b"),
    (r"bert-?large", "bert-large"),
    (r"vit-?(b|l|h)", "vit-{0}"),
    (r"dit-?xl", "dit-xl"),
)
SIZE = re.compile(r"(?<![\dx.])(?<!-a)(\d+(?:\.\d+)?)([bm])(?![a-z])(?:-a(\d+(?:\.\d+)?)b)?")
UNLIKE = 1.6  # times another size than the name says: another model of the family
OF_ONE_KEY_A_HEAD = re.compile(r"gpt|opt|bloom|mpt|pythia|falcon|neox|t5|bert")


def find_model(text: str) -> ModelShape:
    """Return the shape of a published model.

    Args:
        text: its name; "cut to 4 layers" and "w/o MTP" are followed, "SFT", "LoRA" and the like are skipped.

    Raises:
        ConfigError: neither the name nor a size in it says which shape.

    Example:
        >>> find_model("LLAMA3-70B SFT").name, find_model("Grok-1-314B cut to 4 layers").layers
        ('llama-3-70b', 4)
    """
    lower = text.lower()
    plain = re.sub(r"^.*/(?=[^/]*[a-z]{2})", "", re.sub(r"\([^)]*\)", "", lower)).strip()
    key = re.sub(r"[\s_]+", "-", plain).split("distill-")[-1]  # a distilled model has its student's shape
    shape = _by_spelling(key) or _table().get(key) or _nanochat(key) or _by_size(key)
    if shape is None:
        near = ", ".join(get_close_matches(key, _table(), n=3, cutoff=0.0))
        raise ConfigError(f"no shape is known for model {text[:80]!r}; give a config.json, or a name such as {near}")
    if "w/o mtp" in lower:
        shape = replace(shape, mtp_layers=0)
    layers = re.search(r"\b(\d+)[ -]layers?\b", lower)
    return shape.cut(int(layers.group(1))) if layers and 0 < int(layers.group(1)) < shape.layers else shape


def model_names() -> tuple[str, ...]:
    """Canonical names of all models in the table."""
    return tuple(_table())


@cache
def _table() -> dict[str, ModelShape]:
    text = resources.files("octavo.planning").joinpath("models.toml").read_text(encoding="utf-8")
    found: dict[str, ModelShape] = {}
    for family in parse_toml(text).values():
        source = family.pop("source")
        found |= {name: ModelShape(name=name, source=source, **fields) for name, fields in family.items()}
    return found


def _by_spelling(key: str) -> ModelShape | None:
    """The entry of the first matching spelling that the table has and whose size is not unlike the name's."""
    for pattern, template in SPELLINGS:
        match = re.search(pattern, key)
        shape = _table().get(template.format(*match.groups(""))) if match else None
        if shape is not None and _has_size(shape, key):
            return shape
    return None


def _has_size(shape: ModelShape, key: str) -> bool:
    """Whether a name says no size, or about that of a shape; the names of "8x7b" are not their sizes."""
    match = SIZE.search(key)
    if match is None:
        return True
    ratio = float(match.group(1)) * (1e9 if match.group(2) == "b" else 1e6) / shape.parameters
    return 1 / UNLIKE < ratio < UNLIKE


def _nanochat(key: str) -> ModelShape | None:
    """A model of karpathy/nanochat, whose depth is its one setting: width 64 a layer, heads of 128."""
    match = re.search(r"nanochat.*?d(\d+)", key)
    if match is None or not int(match.group(1)):
        return None
    depth = int(match.group(1))
    width = 64 * depth
    heads = max(1, (width + 127) // 128)
    return ModelShape(
        name=f"nanochat-d{depth}",
        layers=depth,
        hidden=width,
        heads=heads,
        ffn=4 * width,
        gated=False,
        vocab=32768,
        source="karpathy/nanochat, scripts/base_train.py",
    )


def _by_size(key: str) -> ModelShape | None:
    """A shape of usual proportions with the size that the name ends with."""
    match = SIZE.search(key)
    total = float(match.group(1)) * (1e9 if match.group(2) == "b" else 1e6) if match else 0.0
    if match is None or not 1e7 <= total <= 1e14:
        return None
    active = float(match.group(3) or 0) * 1e9
    build: Callable[[float, float], dict[str, Any]] = _mixture if 0 < active < total else _dense
    fields = build(total, active)
    if not OF_ONE_KEY_A_HEAD.search(key):
        fields["kv_heads"] = min(8, fields["heads"])
    return ModelShape(name=f"like a {match.group(0)} model", source="the size in its name", **fields)


def _dense(total: float, _active: float) -> dict[str, Any]:
    """Proportions of Llama: about 100 of width a layer, 12 width² weights a layer."""
    hidden = max(256, 256 * round((total / 0.115) ** (1 / 3) / 256))
    layers = max(1, round(total / (12 * hidden**2)))
    return {"layers": layers, "hidden": hidden, "heads": hidden // 128, "ffn": 8 * hidden // 3, "vocab": 128_000}


def _mixture(total: float, active: float) -> dict[str, Any]:
    """Proportions of Qwen3's mixtures: 128 experts, eight a token, a third of what a token meets is attention."""
    hidden = max(512, 256 * round((active / 0.3) ** (1 / 3) / 256))
    layers = max(1, round(0.35 * active / (3 * hidden**2)))
    width = max(128, 128 * round(total / (layers * 128 * 3 * hidden) / 128))
    experts = {"experts": 128, "top_k": 8, "expert_ffn": width}
    return {"layers": layers, "hidden": hidden, "heads": hidden // 64, "head_dim": 128, "vocab": 150_000} | experts
