"""Models by their published names, in whatever spelling: ``LLAMA3-70B SFT``, ``meta-llama/Llama-3.1-70B-Instruct``.

``models.toml`` has the shapes. A spelling counts only where the size in the name, if it has one, is that of the shape.
A name without an entry but with a size ("13B", "30B-A3B") gets a shape of usual proportions: it is ``guessed``, is
named ``like a … model (guessed shape)``, and makes intervals wider.
"""

import re
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
    (r"distill-?llama-?(?:3(?:\.\d)?-?)?(\d+b)", "llama-3-{0}"),
    (r"distill-?qwen-?(?:2(?:\.5)?-?)?(\d+(?:\.\d+)?b)", "qwen-2-{0}"),
    (r"llama-?3(?:\.?\d)?-?nemotron-?(\d+b)", "llama-3-{0}"),
    (r"mixtral-?(8x\d+b)", "mixtral-{0}"),
    (r"llama-?4.*(?:maverick|128e)", "llama-4-maverick"),
    (r"llama-?4(?!.*behemoth)", "llama-4-scout"),
    (r"nemotron-?nano-?v?2?-?(9|12)b", "nemotron-nano-{0}b"),
    (r"llama-?3(?:\.?\d)?-(?:arch-)?(\d+(?:\.\d+)?b)", "llama-3-{0}"),
    (r"llama-?2-?(?:chat)?-?(70b)", "llama-2-{0}"),
    (r"llama-?[12]?-?(\d+b)", "llama-{0}"),
    (r"llama-?(\d+b)", "llama-3-{0}"),
    (r"mistral-?(?:v[\d.]+)?-?nemo", "mistral-12b"),
    (r"mistral-?small|(?:dev|magi)stral", "mistral-24b"),
    (r"mistral-?large", "mistral-123b"),
    (r"mistral-?(\d+b)", "mistral-{0}"),
    (r"qwen-?3-?next", "qwen-3-80b-a3b"),
    (r"qwen-?3-?moe-?(30)b", "qwen-3-30b-a3b"),
    (r"qwen-?3-?moe-?(235)b", "qwen-3-235b-a22b"),
    (r"qwen-?3[.\d]*-?(?:vl|coder|moe)?-?(\d+(?:\.\d+)?b(?:-a\d+b)?)", "qwen-3-{0}"),
    (r"qwen-?2[.\d]*-?(?:vl|coder|math)?-?(\d+(?:\.\d+)?b(?:-a\d+b)?)", "qwen-2-{0}"),
    (r"qwen-?1\.5-?moe", "qwen-1.5-moe-a2.7b"),
    (r"qwen-?(?:1\.5)?-?(\d+b)", "qwen-{0}"),
    (r"deepseek-?v?4-?flash", "deepseek-v4-flash"),
    (r"deepseek-?(?:coder-?)?(?:v?2-?lite|v[23]-?16b)", "deepseek-v2-lite"),  # torchtitan's 16B of V3 is V2-Lite
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
    (r"gpt-?[23]?-?12[56]m", "gpt-126m"),
    (r"gpt-?[23]?-?(\d+(?:\.\d+)?[bm])", "gpt-{0}"),
    (r"mpt-?(\d+[bm])", "mpt-{0}"),
    (r"grok", "grok-1-314b"),
    (r"phi-?3(?:\.5)?-?mini", "phi-3-mini"),
    (r"phi-?4-?mini", "phi-4-mini"),
    (r"phi-?3\.5-?moe", "phi-3.5-moe"),
    (r"phi-?(?:3-?medium|4|(?=14b))", "phi-14b"),
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
VERSION = re.compile(r"([a-z]-?\d)[-p](\d)(?=-|$)")  # "a3-1" of llama3-1-405b, "n2p5" of qwen2p5-7b
SIZE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(b|m)\d?(?![a-z\d])(?:-a(\d+(?:\.\d+)?)b)?")
ANY_SIZE = re.compile(r"(?<![x\d.])(?<!-a)(\d+(?:\.\d+)?)([bm])\d?(?![a-z\d])")  # not 7b of 8x7b, not 3b of a3b
LAYERS = re.compile(r"(?:cut|reduced) to (\d+) layers?|\b(\d+)[- ]layers?\b")
MIXTURES = re.compile(r"\bmoe\b|mixtral|deepseek-?v?[234]\b|dsv3")
# Without blocks of attention and MLP that a size alone could give the proportions of.
NO_DECODERS = re.compile(r"\bt5\b|flux|[mjzbs]amba|granite-?4.*-h\b|\bwan-?\d|diffusion|sdxl|whisper|rwkv|minimax")


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
    key = re.sub(r"[\s_]+", "-", re.sub(r"\([^)]*\)", "", lower).strip())
    key = re.sub(r"^.*/(?=[a-z])", "", key)  # an organisation's name; "ViT-L/16" has a size of patches
    shape = _table().get(key)
    if shape is None:
        key = VERSION.sub(r"\1.\2", key)
        shape = _by_spelling(key) or _nanochat(key) or _by_size(key)
    if shape is None:
        near = ", ".join(get_close_matches(key, _table(), n=3, cutoff=0.0))
        raise ConfigError(f"no shape is known for model {text[:80]!r}; give a config.json, or a name such as {near}")
    if "w/o mtp" in lower:
        shape = replace(shape, mtp_layers=0)
    stated = LAYERS.search(lower)
    layers = int(stated.group(1) or stated.group(2)) if stated else 0
    return shape.cut(layers) if layers and layers != shape.layers else shape


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
    """The entry of the first spelling that matches, is in the table, and has the size in the name."""
    for pattern, template in SPELLINGS:
        match = re.search(pattern, key)
        shape = _table().get(template.format(*match.groups(""))) if match else None
        if shape is not None and _has_size_of(shape, key):
            return shape
    return None


def _has_size_of(shape: ModelShape, key: str) -> bool:
    """Whether a size in the key, if any, is in the shape's name, or within 25 % of its weights (all, or a token's)."""
    sizes = ANY_SIZE.findall(key)
    if not sizes or any(f"{number}{unit}" in shape.name.split("-") for number, unit in sizes):
        return True
    weights = [float(number) * (1e9 if unit == "b" else 1e6) for number, unit in sizes]
    return any(
        0.8 <= each / own <= 1.25 for each in weights for own in (shape.parameters, shape.active_parameters) if own
    )


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
    if match is None or NO_DECODERS.search(key):
        return None
    total = float(match.group(2)) * (1e9 if match.group(3) == "b" else 1e6)
    active = float(match.group(4) or 0) * 1e9
    if not 1e7 <= total <= 1e14:
        return None
    if match.group(1):
        fields = _experts_of(max(1, min(4096, int(match.group(1)))), total)
    elif 0 < active < total:
        fields = _mixture(total, active)
    elif MIXTURES.search(key):
        raise ConfigError(
            f"{key[:60]!r} is a mixture of experts, and {match.group(0)} does not say how many of its weights a token "
            "meets; write both, as 30B-A3B, or give a config.json"
        )
    else:
        fields = _dense(total, active)
    return ModelShape(
        name=f"like a {match.group(0)} model (guessed shape)", guessed=True, source="the size in its name", **fields
    )


def _dense(total: float, _active: float) -> dict[str, Any]:
    """Proportions of Llama 3: about 100 of width a layer, 8 heads of keys, MLPs of 3.5 widths, a tied head if small."""
    hidden = max(256, 256 * round((total / 0.115) ** (1 / 3) / 256))
    heads, vocab, tied = hidden // 128, 128_000, total < 4e9
    key_heads = min(8, heads)
    block = hidden * (2 * hidden + 2 * 128 * key_heads + 3 * 3.5 * hidden)
    layers = max(1, round((total - vocab * hidden * (1 if tied else 2)) / block))
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": key_heads}
    return shape | {"ffn": 7 * hidden // 2, "vocab": vocab, "tied": tied}


def _mixture(total: float, active: float) -> dict[str, Any]:
    """Usual width, depth and attention of what a token meets; as many experts, eight a token, as both sizes ask for."""
    hidden = max(256, 256 * round(1750 * (active / 1e9) ** (1 / 3) / 256))
    layers, heads = max(1, round(hidden / 90)), hidden // 64
    key_heads = min(8, heads)
    vocab = max(1, min(150_000, round(0.2 * active / hidden)))
    attention = layers * 2 * hidden * 128 * (heads + key_heads)
    of_token = max(0.1 * active, active - attention - vocab * hidden)
    of_all = max(of_token, total - attention - 2 * vocab * hidden)
    step = 8 if of_all > 8 * of_token else 4
    experts = max(8, step * round(8 * of_all / of_token / step))
    width = max(16, 16 * round(of_all / (layers * 3 * hidden * experts) / 16))
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "head_dim": 128, "kv_heads": key_heads}
    return shape | {"vocab": vocab, "experts": experts, "top_k": 8, "expert_ffn": width}


def _experts_of(count: int, size: float) -> dict[str, Any]:
    """A dense model of ``size`` with ``count`` MLPs instead of one, two of which a token meets, as Mixtral."""
    shape = _dense(size, 0.0)
    return shape | {"experts": count, "top_k": min(2, count), "expert_ffn": shape.pop("ffn")}
