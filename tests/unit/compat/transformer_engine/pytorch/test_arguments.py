import pytest
import torch
from torch import nn

from octavo.compat.transformer_engine.pytorch import (
    DotProductAttention,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
)
from octavo.compat.transformer_engine.pytorch.arguments import (
    NO_EFFECT,
    ONLY_DEFAULT,
    activation_name,
    initialize,
    visibility,
    window_of,
)
from octavo.errors import ConfigError

SIZES = {
    Linear: (8, 8),
    LayerNorm: (8,),
    RMSNorm: (8,),
    LayerNormLinear: (8, 8),
    LayerNormMLP: (8, 8),
    DotProductAttention: (2, 4),
    MultiheadAttention: (8, 2),
    TransformerLayer: (8, 8, 2),
}
MODULES = pytest.mark.parametrize("kind", SIZES)


@MODULES
def test_arguments_without_effect_are_accepted(kind):
    modules = []
    without_effect: dict[str, object] = {**dict.fromkeys(NO_EFFECT, 3), **ONLY_DEFAULT}
    for arguments in ({}, without_effect):
        torch.manual_seed(0)
        modules.append(kind(*SIZES[kind], **arguments))
    plain, other = modules
    assert repr(other) == repr(plain)
    values = other.state_dict()
    assert values.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, values[name]) for name, value in plain.state_dict().items() if value is not None)


@MODULES
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fuse_wgrad_accumulation", True),
        ("return_bias", True),
        ("save_original_input", True),
        ("qk_norm_eps", 1e-5),
        ("drop_path_rate", 0.1),
        ("alibi_slopes", torch.ones(2)),
    ],
)
def test_unsupported_arguments_are_refused_by_name(kind, name, value):
    with pytest.raises(ConfigError, match=f"{kind.__name__} does not support {name}="):
        kind(*SIZES[kind], **{name: value})


@MODULES
def test_activation_and_norm_names_are_checked(kind):
    for mode in (None, "column", "row"):
        kind(*SIZES[kind], parallel_mode=mode)
    with pytest.raises(ConfigError, match="parallel_mode must be one of None, 'column', 'row', not 'nonsense'"):
        kind(*SIZES[kind], parallel_mode="nonsense")


@MODULES
def test_an_unknown_argument_is_a_type_error(kind):
    with pytest.raises(TypeError, match="no argument 'tp_sizes'"):
        kind(*SIZES[kind], tp_sizes=2)


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear, LayerNormMLP, MultiheadAttention, TransformerLayer])
def test_a_call_checks_its_arguments_too(kind):
    module, x = kind(*SIZES[kind]), torch.ones(2, 3, 8)
    module(x, is_first_microbatch=True)
    with pytest.raises(ConfigError, match="inference_params"):
        module(x, inference_params=object())
    with pytest.raises(TypeError, match="no argument 'cache'"):
        module(x, cache=None)


def test_weights_start_as_published():
    layer = TransformerLayer(64, 256, 4)
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.023, rel=0.05), name
        elif name.endswith("norm.weight"):
            assert bool((parameter == 1).all()), name
        else:
            assert not parameter.any(), name


def test_initialisers_go_where_they_belong():
    ones, twos = nn.init.ones_, lambda weight: nn.init.constant_(weight, 2.0)
    layer = TransformerLayer(8, 8, 2, init_method=ones, output_layer_init_method=twos, layer_type="decoder")
    values = {name: p.mean().item() for name, p in layer.named_parameters() if p.ndim == 2}
    twos_at = {name for name, value in values.items() if value == 2}
    assert twos_at == {
        "layer.self_attention.out.weight",
        "layer.cross_attention.out.weight",
        "layer.mlp.fc2.weight",
    }
    assert {value for name, value in values.items() if name not in twos_at} == {1.0}
    linear = nn.Linear(2, 2)
    initialize(linear, ones)
    assert linear.weight.mean() == 1
    assert not linear.bias.any()


def test_gelu_is_the_approximation():
    assert (activation_name("gelu"), activation_name("geglu"), activation_name("swiglu")) == (
        "gelu_tanh",
        "geglu_tanh",
        "swiglu",
    )
    with pytest.raises(ConfigError, match=r"activation must be one of .*, not 'mish'"):
        activation_name("mish")


@pytest.mark.parametrize(
    ("window_size", "causal"), [((4, 1), True), ((4, 2), False), ((4, 0), False), ((-2, -2), False), ((-2, 0), True)]
)
def test_windows_that_do_not_exist_here_are_refused(window_size, causal):
    with pytest.raises(ConfigError, match="window_size"):
        window_of(window_size, causal=causal)


def test_windows():
    assert window_of(None, causal=True) is None
    assert window_of((-1, -1), causal=False) is None
    assert window_of((0, 0), causal=True) == window_of((0, 0), causal=False) == 0


def test_true_in_a_mask_hides_a_key():
    hides = torch.tensor([[False, True, False]]).reshape(1, 1, 1, 3)
    sees = [[True, False, True]]
    for found, wanted in (
        (visibility("padding", hides)["padding"], sees),
        (visibility("padding,causal", (hides.new_ones(1, 1, 1, 2), hides))["padding"], sees),
        (visibility("arbitrary", hides)["mask"], [[sees]]),
    ):
        assert found is not None
        assert found.tolist() == wanted
    assert visibility("causal", None) == {"padding": None, "mask": None}


@pytest.mark.parametrize(
    ("mask_type", "mask"),
    [
        ("causal", torch.ones(1, 1, 1, 3, dtype=torch.bool)),
        ("padding", None),
        ("arbitrary", None),
        ("padding", torch.ones(1, 1, 2, 3, dtype=torch.bool)),
        ("padding", torch.ones(1, 3, dtype=torch.bool)),
        ("arbitrary", torch.ones(1, 1, 1, 3)),
    ],
)
def test_mask_for_a_type_without_mask_is_refused(mask_type, mask):
    with pytest.raises(ConfigError, match="mask"):
        visibility(mask_type, mask)
