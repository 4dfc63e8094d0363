"""A decoder as an engine computes it: its linear layers under a profile, everything else in the profile's dtype.

    linear layers      those that ``octavo.convert`` takes, the head where the profile casts it: :class:`EngineLinear`
    a folder in FP8    those that it stores as codes; codes are kept, unless the profile requantizes
    experts            those of transformers' interface as linear layers of their own, as files have them
    everything else    parameters rounded to ``profile.activations``; the residual stream and logits have that dtype
    keys and values    through ``profile.kv_cache``, of whose static casts the scale is 1

:class:`EngineCopies` makes copies of one model that share what they have in common: parameters of one dtype, and codes
of one cast. A layer's weight is rounded to the activations' dtype before its cast, as an engine loads it.

Layers whose scale comes from calibration or past steps need their inputs' amaxes, which :func:`input_amaxes` measures.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature

import torch
from torch import Tensor, nn

from octavo.convert import choose_layers, convert, other_modules, unfuse_experts
from octavo.convert.experts import is_experts
from octavo.engines.linear import check_input_scale, linear_of_codes, needs_calibration, weight_as
from octavo.errors import ConfigError, DataError
from octavo.kernels import needs_widening
from octavo.language_model import KVTransform, LanguageModel, logits_of, stepwise_logits
from octavo.models import Llama
from octavo.models.served_forward import cast_of_cache, check_linear_layers, is_skipped
from octavo.nn import Linear
from octavo.nn.parameter_rounding import wide_parameters
from octavo.numerics import PerRow, PerTensor, QuantizedTensor
from octavo.numerics.granularity import granularity_in_words
from octavo.recipes.engines.catalog import resolved
from octavo.recipes.engines.profile import EngineProfile

__all__ = [
    "EngineCopies",
    "EngineLinear",
    "EngineModel",
    "check_token_ids",
    "copies_for",
    "engine_layers",
    "input_amaxes",
    "is_of_expert",
    "model_as",
    "watching",
]

KEPT_CASTS = 4  # casts of all weights that stay in memory, a byte an element each
NORMS = ("input_layernorm", "post_attention_layernorm")  # whose outputs linear layers alone read
FUSED = ("llama", "mistral", "qwen2", "qwen3")  # model types of transformers in which that is so


class EngineLinear(nn.Module):
    """A linear layer under a profile; see :func:`octavo.engines.linear_as`.

    Args:
        codes: of the weight, as :func:`octavo.engines.weight_as` gives them.
        bias: [N] or None.
        profile: the engine.
        input_scale: float32 [], where the input's scale is from calibration.
        input_amax: float32 [], where it is from past steps, or the calibration's scale has to be made.
    """

    def __init__(
        self,
        codes: QuantizedTensor,
        bias: Tensor | None,
        profile: EngineProfile,
        *,
        input_scale: Tensor | None = None,
        input_amax: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.codes, self.bias, self.profile = codes, bias, profile
        is_dynamic = not needs_calibration(profile)
        self.input_scale = None if is_dynamic else input_scale
        self.input_amax = None if is_dynamic or input_scale is not None else input_amax
        check_input_scale(profile, self.input_scale, self.input_amax)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the profile's ``activations``."""
        y = linear_of_codes(
            x, self.codes, self.profile, bias=self.bias, input_scale=self.input_scale, input_amax=self.input_amax
        )
        return y.to(self.profile.activations)


class EngineModel(nn.Module):
    """A decoder under a profile: token ids [B, T] → logits [B, T, V] in its ``activations``.

    Attributes:
        profile: the engine.
        layers: its :class:`EngineLinear` by path in the decoder.
    """

    def __init__(self, model: nn.Module, profile: EngineProfile) -> None:
        super().__init__()
        self.model, self.profile = model, profile
        self.layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, EngineLinear)}

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → logits [B, T, V]."""
        return logits_of(self.model, tokens, self.kv_transform)

    @torch.no_grad()
    def stepwise(self, tokens: Tensor) -> Tensor:
        """The same, a pass for each position, which reads earlier keys and values from the engine's cache."""
        return stepwise_logits(self.model, tokens, self.kv_transform)

    @property
    def kv_transform(self) -> KVTransform | None:
        """Cast of a layer's keys and values in the cache, with decoded results; None casts none."""
        cast = self.profile.kv_cache
        return None if cast is None else cast_of_cache(cast)

    def layer_output(self, path: str, x: Tensor) -> Tensor:
        """Output of a linear layer for another engine's input, which a layer without casts takes in its own dtype."""
        layer = self.layers.get(path)
        y: Tensor = self.model.get_submodule(path)(x.to(self.profile.activations)) if layer is None else layer(x)
        return y


class EngineCopies:
    """Copies of one decoder under any profiles, which share parameters and codes.

    Args:
        model: octavo's Llama or a decoder of transformers, or the ``LanguageModel`` of one, in high precision or with
            stored FP8 codes; not changed. Copies compute by their classes' ``forward``, not by one that a trainer has
            set on the model.
        input_amaxes: by path, as :func:`input_amaxes` gives them; None serves profiles that measure their inputs.

    Raises:
        ConfigError: the model is no such decoder.

    Example:
        >>> from octavo.engines import get
        >>> from octavo.models import Llama, LlamaConfig
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
        >>> llama = Llama(LlamaConfig(**sizes, num_heads=2, num_kv_heads=1, max_positions=16))
        >>> EngineCopies(llama).of(get("vllm-token"))(torch.zeros(1, 4, dtype=torch.long)).dtype
        torch.bfloat16
    """

    def __init__(self, model: LanguageModel | nn.Module, input_amaxes: Mapping[str, Tensor] | None = None) -> None:
        self._model, self._amaxes = _unfused(_decoder_of(model)), {} if input_amaxes is None else input_amaxes
        self._in_dtype: dict[torch.dtype, nn.Module] = {}
        self._codes: dict[tuple[object, ...], dict[str, QuantizedTensor]] = {}

    def of(self, profile: str | EngineProfile) -> EngineModel:
        """The decoder as an engine, given by its profile or name, computes it.

        Raises:
            ConfigError: an unknown profile, no layer is quantized, weights that the engine quantizes are no linear
                layers', a folder's codes have scales of another shape than the engine's, a scale is missing, or a
                norm's cast is fused in a model whose norms are not known.
        """
        profile = resolved(profile)
        copied = _shared_copy(self._base(profile.activations))
        layers = engine_layers(copied, profile)
        codes = self._codes_of(layers, profile)
        for path, layer in layers.items():
            scale = layer.input_scale if isinstance(layer, Linear) and layer.recipe.has_static_input else None
            amax = self._amaxes.get(path)
            if scale is None and amax is None and needs_calibration(profile):
                raise ConfigError(
                    f"{profile.name} does not measure inputs, and {path} has no scale; give input_amaxes() of a text "
                    "that reaches it"
                )
            new = EngineLinear(codes[path], layer.bias, profile, input_scale=scale, input_amax=amax)
            copied.set_submodule(path, new)
        if profile.fused_cast:
            _widen_norms(copied)
        if needs_widening(torch.empty(0, dtype=profile.activations)):
            convert(copied, "bf16", convert_head=True, layer_filter=lambda _, layer: type(layer) is nn.Linear)
        return EngineModel(copied.eval(), profile)

    def weights_of(self, profile: EngineProfile) -> dict[str, Tensor | QuantizedTensor]:
        """Weights as the engine loads them, by path: in the dtype of its activations, or a folder's codes."""
        layers = engine_layers(self._base(profile.activations), profile)
        return {path: _weight_of(layer) for path, layer in layers.items()}

    def _base(self, dtype: torch.dtype) -> nn.Module:
        if dtype not in self._in_dtype:
            self._in_dtype[dtype] = _shared_copy(self._model, dtype)
        return self._in_dtype[dtype]

    def _codes_of(self, layers: Mapping[str, nn.Linear], profile: EngineProfile) -> dict[str, QuantizedTensor]:
        key = (profile.activations, profile.weight, profile.requantizes, profile.head, profile.skipped)
        if key not in self._codes:
            while len(self._codes) >= KEPT_CASTS:
                del self._codes[next(iter(self._codes))]
            weights = {path: _weight_of(layer) for path, layer in layers.items()}
            for path, weight in weights.items():
                _check_codes_fit(path, weight, profile)
            self._codes[key] = {path: weight_as(weight, profile) for path, weight in weights.items()}
        return self._codes[key]


def model_as(
    model: LanguageModel | nn.Module,
    profile: str | EngineProfile,
    *,
    input_amaxes: Mapping[str, Tensor] | None = None,
) -> EngineModel:
    """A decoder as an engine computes it, without changing the model; arguments as for :class:`EngineCopies`.

    Example:
        >>> from octavo.engines import get
        >>> from octavo.models import Llama, LlamaConfig
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
        >>> llama = Llama(LlamaConfig(**sizes, num_heads=2, num_kv_heads=1, max_positions=16))
        >>> len(model_as(llama, get("vllm-token")).layers)
        7
    """
    return EngineCopies(model, input_amaxes).of(profile)


def engine_layers(model: nn.Module, profile: EngineProfile) -> dict[str, nn.Linear]:
    """Layers that an engine quantizes, by path: those with stored codes, or those that ``octavo.convert`` takes.

    Raises:
        ConfigError: there are none, or ``octavo.convert`` takes weights that are no linear layers'.
    """
    linears = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    if coded := {path: layer for path, layer in linears.items() if isinstance(_weight_of(layer), QuantizedTensor)}:
        return coded
    chosen, _ = choose_layers(model, convert_head=profile.head)
    chosen = {path: layer for path, layer in chosen.items() if not is_skipped(path, profile)}
    if not chosen:
        raise ConfigError(f"{profile.name} quantizes no layer of this {type(model).__name__}")
    check_linear_layers(model, profile)
    return chosen


def is_of_expert(path: str) -> bool:
    """Whether a layer is an expert's, which sees the tokens that a router sends it.

    Example:
        >>> (
        ...     is_of_expert("model.layers.0.mlp.experts.3.up_proj"),
        ...     is_of_expert("model.layers.0.mlp.shared_expert.up_proj"),
        ... )
        (True, False)
    """
    return ".experts." in path


def check_token_ids(model: nn.Module, tokens: Tensor) -> None:
    """Raise ConfigError unless the model embeds tokens, and they are whole numbers within its vocabulary."""
    size = _vocabulary_size(model)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool:
        raise ConfigError(f"tokens are ids in int64, not {str(tokens.dtype).removeprefix('torch.')}")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        raise ConfigError(
            f"token ids of this model are 0 to {size - 1}, and tokens have {int(tokens.min())} to {int(tokens.max())}; "
            "use the model's own tokenizer"
        )


def _decoder_of(model: LanguageModel | nn.Module) -> nn.Module:
    """The decoder of a model; raise ConfigError unless it embeds token ids and is called with them."""
    decoder = model.model if isinstance(model, LanguageModel) else model
    _vocabulary_size(decoder)
    parameters = signature(type(decoder).forward).parameters
    has_keywords = any(each.kind is each.VAR_KEYWORD for each in parameters.values())  # of a wrapper
    if not (isinstance(decoder, Llama) or "input_ids" in parameters or has_keywords):
        raise _not_a_decoder(decoder)
    return decoder


def _vocabulary_size(model: object) -> int:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    for module in modules:
        if isinstance(module, nn.Embedding):
            return module.num_embeddings
    raise _not_a_decoder(model)


def _not_a_decoder(model: object) -> ConfigError:
    advice = "give its .model" if isinstance(model, LanguageModel) else "load one with load_language_model(…).model"
    return ConfigError(
        "a model is octavo's Llama or a decoder of transformers, from token ids to logits, not a "
        f"{type(model).__name__}; {advice}"
    )


@torch.no_grad()
def input_amaxes(model: LanguageModel | nn.Module, windows: Iterable[Tensor]) -> dict[str, Tensor]:
    """Largest magnitude of every linear layer's input over windows of token ids [T], float32 [] by path.

    Raises:
        ConfigError: the model is no decoder; see :class:`EngineCopies`.
        DataError: an input is not finite.
    """
    amaxes: dict[str, Tensor] = {}

    def see(path: str, x: Tensor, _: Tensor) -> None:
        amax = x.abs().amax().float()
        amaxes[path] = torch.maximum(amaxes[path], amax) if path in amaxes else amax

    model = _unfused(_decoder_of(model))
    with watching({path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}, see):
        for window in windows:
            logits_of(model, window[None])
    for path, amax in amaxes.items():
        if not amax.isfinite():
            raise DataError(f"the input of {path} has NaN or infinities, so it has no scale; check the model's weights")
    return amaxes


def copies_for(model: LanguageModel | nn.Module, profiles: Sequence[EngineProfile], tokens: Tensor) -> EngineCopies:
    """Copies of a model for profiles; inputs' amaxes, if one needs them, are those in high precision on the tokens."""
    decoder = _decoder_of(model)
    check_token_ids(decoder, tokens)
    needed = any(map(needs_calibration, profiles))
    return EngineCopies(decoder, input_amaxes(decoder, tokens) if needed else None)


@contextmanager
def watching(layers: Mapping[str, nn.Module], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``see(path, input, output)`` in each forward pass of the layers inside the block."""

    def report(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda _, inputs, output: see(path, inputs[0], output)

    with ExitStack() as hooks:
        for path, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(report(path)))
        yield


def _unfused(model: nn.Module) -> nn.Module:
    """A copy with the same tensors whose experts have linear layers of their own; the model itself without experts."""
    if not any(map(is_experts, other_modules(model).values())):
        return model
    copied = _shared_copy(model)
    unfuse_experts(copied)
    return copied


def _weight_of(layer: nn.Linear) -> Tensor | QuantizedTensor:
    codes = layer.stored_codes() if isinstance(layer, Linear) else None
    return layer.weight.detach() if codes is None else codes


def _check_codes_fit(path: str, weight: Tensor | QuantizedTensor, profile: EngineProfile) -> None:
    """Raise ConfigError for codes that the engine does not read; one scale a tensor is one for every row."""
    reads = [profile.weight.granularity] + [PerTensor()] * (profile.weight.granularity == PerRow())
    if isinstance(weight, QuantizedTensor) and weight.granularity not in reads:
        ours, theirs = map(granularity_in_words, (weight.granularity, profile.weight.granularity))
        raise ConfigError(
            f"the stored weight of {path!r} has a scale a {ours}, and {profile.name} reads one a {theirs}; give the "
            "model in high precision, or an engine that reads such a folder"
        )


def _shared_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy with the same tensors; with ``dtype``, floating parameters of 16 bits and more are rounded to it."""
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for module in copied.modules():
        vars(module).pop("forward", None)  # set by accelerate or TRL, and bound to the model that was copied
    if dtype is None:
        return copied
    rounded: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for table, name, parameter in wide_parameters(copied):
        if id(parameter) not in rounded:
            rounded[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        table[name] = rounded[id(parameter)]
    return copied


def _widen_norms(model: nn.Module) -> None:
    """Let the norms before linear layers compute in FP32, and not round their output."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    has_experts = isinstance(model, Llama) and model.config.num_experts is not None
    if has_experts or not (isinstance(model, Llama) or kind in FUSED):
        raise ConfigError(
            f"a cast fused with a norm is known of Llama's layout alone, not of this {type(model).__name__}; "
            "use a profile without fused_cast"
        )
    for path, norm in model.named_modules():
        if path.endswith(NORMS):
            norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
