"""Share of the forward's multiplications in FP8, by architecture: small configurations of transformers, no weights.

    python -m benchmarks.model_zoo [--only mixtral,gpt2] [--all [--every N]] [--no-write]

A model is built first and run forward and backward as it is: what fails there is listed as not built, with the reason.
It is then converted, takes a step of SGD, and is restored. That fails where anything raises, where the state_dict is
not the same, where the report leaves a weight out, or where the restored model computes other numbers than before.

It also fails where the converted model's outputs, or the gradients of its matrices, are too far from the plain model's.
How far rounding may take them depends on the model: a token near the border of two experts goes to the other one, and
sums cancel. So the plain model runs :data:`NOISY_RUNS` times with noise where octavo rounds, no smaller than FP8's:
every converted weight and every input of its module times 1 + u / 16, every gradient of the module's output times
1 + u / 8, u uniform in ±1; 1/16 and 1/8 are the largest relative errors of E4M3 and E5M2. The distance (the norm of the
difference) may be :data:`MARGIN` times the largest of these runs. Gradients are compared by kind of matrix: those that
differ in their numbers alone (of layers, of experts) are one vector. The bounds are wide, often 0.3 of a gradient's
norm: experts whose outputs are twice too large break them, 1.3 times too large do not.

"linear layers" is the share with ``nn.Linear`` alone converted, as octavo did before it knew experts and Conv1D.

Counted are the multiplications of one forward by weights, as the operators that ran have them: a token's experts, not
all. Attention's products of activations are left out. ``--all`` adds every other architecture of transformers whose
small configuration builds as one of :data:`FAMILIES`, each once; ``--every N`` takes one in N of them.
"""

import argparse
import copy
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import octavo
from benchmarks.measure import hardware, markdown_table, publish
from octavo.convert import ConversionReport, other_modules
from octavo.formats import E4M3, E5M2, Format

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LARGEST = 35_000_000  # parameters of a model that --all builds
TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id"}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
NORMED = re.compile(r"\.parametrizations\.weight\.original[01]$")  # torch's weight_norm, of a linear layer
SIZES: dict[str, Any] = {
    **TINY, **EXPERTS, "use_cache": False, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
}  # fmt: skip
HALVES: dict[str, Any] = {  # of encoder-decoders, and other names of the same sizes
    "d_model": 128, "d_ff": 256, "d_kv": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "decoder_start_token_id": 1, "encoder_sparse_step": 2,
    "decoder_sparse_step": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "embedding_size": 32,
}  # fmt: skip
PICTURES: dict[str, Any] = {"image_size": 64, "num_channels": 3}
# Name of a family: transformers' mapping of its models, their sizes, and what they take.
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "causal": ("CAUSAL_LM", SIZES, ("input_ids",)),
    "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM", {**SIZES, **HALVES}, ("input_ids", "decoder_input_ids")),
    "encoder": ("MASKED_LM", {**SIZES, **HALVES}, ("input_ids",)),
    "vision": ("IMAGE_CLASSIFICATION", {**SIZES, **HALVES, **PICTURES}, ("pixel_values",)),
}
# Class name of the model without "ForCausalLM", and what its configuration takes besides TINY.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3", {"sliding_window": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "gpt-oss": ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0}}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "phimoe": ("Phimoe", {"num_local_experts": 8}),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 8}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 128}),
    "qwen3-next": ("Qwen3Next", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 128,
                                 "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                                 "linear_key_head_dim": 32, "linear_value_head_dim": 32,
                                 "layer_types": ["linear_attention", "full_attention"]}),
    "llama4": ("Llama4", {"num_local_experts": 4, "intermediate_size_mlp": 256, "interleave_moe_layer_step": 1}),
    "jamba": ("Jamba", {"num_experts": 8, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
                        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
                        "mamba_dt_rank": 8}),
    "deepseek-v3": ("DeepseekV3", {**EXPERTS, **MLA, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
                                   "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 16}),
    "glm4-moe": ("Glm4Moe", {**EXPERTS, "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
                             "first_k_dense_replace": 1}),
    "ernie4.5-moe": ("Ernie4_5_Moe", {**EXPERTS, "moe_num_experts": 8, "moe_k": 2}),
    "jetmoe": ("JetMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 32,
                          "num_key_value_heads": 4}),
    "gpt2": ("GPT2LMHead", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "openai-gpt": ("OpenAIGPTLMHead", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}  # fmt: skip


NOISY_RUNS, MARGIN = 3, 2.0


class NotBuiltError(Exception):
    """A plain model that cannot be created, or run forward and backward, with this configuration."""


class Row(NamedTuple):
    """One architecture."""

    name: str
    family: str
    before: float
    after: float
    problem: str
    left: str


def model_class_of(name: str) -> Any:
    """The class of a model of :data:`MODELS`."""
    import transformers

    base = MODELS[name][0]
    known = getattr(transformers, base if base.endswith("Head") else f"{base}ForCausalLM", None)
    return known or getattr(transformers, f"{base}Model")


def build(name: str) -> nn.Module:
    """Create a model of :data:`MODELS` with random weights."""
    model_class, (_, options) = model_class_of(name), MODELS[name]
    config = model_class.config_class(
        **{**{key: value for key, value in TINY.items() if key not in options}, **options}
    )
    torch.manual_seed(0)
    model: nn.Module = model_class(config)
    return model


def inputs_of(family: str) -> dict[str, Tensor]:
    """The arguments of a model of a family."""
    tokens = torch.arange(len(TOKENS), len(TOKENS) + 32).reshape(2, 16)  # no padding: its embedding is zero
    picture = torch.linspace(-1, 1, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64)
    return {name: picture if name == "pixel_values" else tokens for name in FAMILIES[family][2]}


class Multiplications(TorchDispatchMode):
    """Counts multiplications by a model's weights: those of octavo's operators, and all others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.in_fp8 = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet, tensors = func.overloadpacket, [each for each in args if isinstance(each, Tensor)]
        if packet is torch.ops.octavo.native_mm:
            a, _, b, *_ = tensors
            self.in_fp8 += a.shape[0] * a.shape[1] * b.shape[0]
        elif any(each.untyped_storage().data_ptr() in self._weights for each in tensors):
            self.others += self._count(packet, tensors, args, kwargs, out)
        return out

    @staticmethod
    def _count(packet: Any, tensors: list[Tensor], args: Any, kwargs: Any, out: Any) -> int:
        if packet.__name__ in ("_grouped_mm", "grouped_mm_fallback"):
            return tensors[0].numel() * tensors[1].shape[-1]
        formula = flop_registry.get(packet)
        return 0 if formula is None else formula(*args, **(kwargs or {}), out_val=out) // 2

    @property
    def share(self) -> float:
        """The share in FP8."""
        share: float = self.in_fp8 / max(1, self.in_fp8 + self.others)
        return share


def measured_share(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Share of the multiplications of one forward that run in FP8."""
    with torch.no_grad(), Multiplications(model) as counted:
        model(**inputs)
    return float(counted.share)


def check(model: nn.Module, inputs: dict[str, Tensor]) -> str:
    """Convert, step, restore and compare; what went wrong, or nothing."""
    with torch.no_grad():
        before = model(**inputs)[0]
    keys = list(model.state_dict())
    octavo.convert(model, "tensorwise")
    if list(model.state_dict()) != keys:
        return "the state_dict has other keys"
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(**inputs)[0].float().square().mean().backward()
    if not all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
        return "a gradient is not finite"
    optimizer.step()
    model.load_state_dict(saved)
    octavo.restore(model)
    with torch.no_grad():
        return "" if torch.equal(model(**inputs)[0], before) else "the restored model computes other numbers"


def results_of(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output of a model, and the gradients of its matrices by name."""
    model.zero_grad()
    output = model(**inputs)[0].float()
    output.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.ndim > 1 and p.grad is not None}
    model.zero_grad()
    return {"the output": output.detach(), **gradients}


def distances(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Norms of the differences of :func:`results_of`, by kind; what one of them lacks is zeros."""
    squares: Counter[str] = Counter()
    for name in {**expected, **found}:
        pair = [each[name].double() for each in (found, expected) if name in each]
        difference = pair[0] - pair[1] if len(pair) > 1 else pair[0]
        squares[re.sub(r"\.\d+(?=\.|$)", ".*", name)] += float(difference.square().sum())  # type: ignore[assignment]
    return {kind: square**0.5 for kind, square in squares.items()}


def add_noise(model: nn.Module, report: ConversionReport, seed: int) -> None:
    """Multiply what octavo would round by 1 + u · the largest relative error of its format, u uniform in ±1."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(x: Tensor, fmt: Format) -> Tensor:
        u = 2 * torch.rand(x.shape, generator=generator) - 1
        return x * (1 + u * 2.0 ** -(fmt.mantissa_bits + 1)).to(x.dtype)

    def of_input(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (noisy(args[0], E4M3), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: noisy(kwargs[first], E4M3)}

    def of_gradient(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: noisy(gradient, E5M2))

    weights = [*(f"{path}.weight" for path in report.converted), *report.weights]
    for path in dict.fromkeys(name.rpartition(".")[0] for name in weights):
        model.get_submodule(path).register_forward_pre_hook(of_input, with_kwargs=True)
        model.get_submodule(path).register_forward_hook(of_gradient)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if NORMED.sub(".weight", name) in weights:
                parameter.copy_(noisy(parameter, E4M3))


def wrong_numbers(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], noisy_runs: Sequence[Mapping[str, Tensor]]
) -> str:
    """Sentence about the kind of result that is farthest beyond its bound; empty if none is."""
    norms = distances(expected, {})
    bounds = {kind: MARGIN * max(distances(run, expected)[kind] for run in noisy_runs) for kind in norms}
    off = distances(found, expected)
    beyond = {kind: off[kind] / max(bounds[kind], 1e-30) for kind in norms if not off[kind] <= bounds[kind]}
    if not beyond:
        return ""
    kind = max(beyond, key=beyond.__getitem__)
    relative = [number / max(norms[kind], 1e-30) for number in (off[kind], bounds[kind])]
    off_by, bound = relative
    return f"{len(beyond)} of {len(norms)} beyond rounding: {kind} is {off_by:.3g} off, the bound is {bound:.3g}"


def plain(make: Callable[[], nn.Module], inputs: dict[str, Tensor]) -> nn.Module:
    """Create a model that runs forward and backward before octavo sees it.

    Raises:
        NotBuiltError: it does not.
    """
    try:
        model = make().eval()
        trial = copy.deepcopy(model)  # a forward may leave tensors in the model that no copy can be made of
        trial(**inputs)[0].float().square().mean().backward()
    except Exception as error:  # any model may raise anything
        raise NotBuiltError(_first_line(error)) from error
    return model


def row(name: str, make: Callable[[], nn.Module], family: str = "causal") -> Row:
    """Measure one architecture.

    Raises:
        NotBuiltError: the plain model does not run.
    """
    inputs = inputs_of(family)
    model = plain(make, inputs)
    try:
        return _measured(name, family, model, inputs)
    except Exception as error:  # noqa: BLE001 (whatever it is, the plain model does not raise it)
        return Row(name, family, 0.0, 0.0, _first_line(error), "")


def _measured(name: str, family: str, model: nn.Module, inputs: dict[str, Tensor]) -> Row:
    # Each has its backward pass before other forwards: LeViT keeps a tensor of its first graph in eval mode.
    linear_alone, converted, unchanged, *noisy = (copy.deepcopy(model) for _ in range(3 + NOISY_RUNS))
    expected = results_of(unchanged, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models in which nothing is converted
        octavo.convert(linear_alone, "tensorwise", skip=list(other_modules(linear_alone)))
        before = measured_share(linear_alone, inputs)
        report = octavo.convert(converted, "tensorwise")
        found = results_of(converted, inputs)
        after = measured_share(converted, inputs)
        problem = check(model, inputs)
        for seed, each in enumerate(noisy):
            add_noise(each, report, seed)
        runs = [results_of(each, inputs) for each in noisy]
        problem = problem or wrong_numbers(expected, found, runs)
    named = {f"{path}.weight" for path in (*report.converted, *report.skipped)}
    named |= {*report.parameters, *report.weights}
    matrices = {NORMED.sub(".weight", name) for name, p in model.named_parameters() if p.ndim > 1}
    if matrices - named:
        problem = problem or f"not in the report: {min(matrices - named)}"
    rest = report.shares.by_path
    largest = max(rest, key=lambda path: rest[path].multiplications, default="")
    return Row(name, family, before, after, problem, largest)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def every_model() -> Iterator[tuple[str, str, Callable[[], nn.Module]]]:
    """All of transformers' models of the families: architecture, family, and how to create one.

    An architecture that is in several families comes several times, and one of :data:`MODELS` not at all.
    """
    from transformers.models.auto import modeling_auto

    known = {model_class_of(name) for name in MODELS}
    for family, (mapping, sizes, _) in FAMILIES.items():
        for config_class, model_classes in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING").items():
            model_class = model_classes[0] if isinstance(model_classes, tuple) else model_classes
            if model_class not in known:
                known.add(model_class)
                yield config_class.model_type, family, partial(small, config_class, model_class, sizes)


def small(config_class: Any, model_class: Any, sizes: dict[str, Any]) -> nn.Module:
    """Create a model with those sizes that its configuration knows by these names."""
    default = config_class()
    known = {*default.to_dict(), *config_class.attribute_map}
    latent = {**MLA, "head_dim": MLA["qk_rope_head_dim"], "num_key_value_heads": 4}
    own = {**sizes, **(latent if "kv_lora_rank" in known else {})}
    one_a_stage = {key for key in own if isinstance(getattr(default, key, None), list | tuple)} - TOKENS
    one_a_stage |= {"num_layers", "num_hidden_layers"} if "depths" in known else set()
    config = config_class(**{key: value for key, value in own.items() if key in known - one_a_stage})
    with torch.device("meta"):
        large = sum(p.numel() for p in model_class(config).parameters())
    if large > LARGEST:
        raise ValueError(f"{large:,} parameters: its sizes have names of their own")
    torch.manual_seed(0)
    model: nn.Module = model_class(config)
    return model


def measure_all(candidates: Iterable[tuple[str, str, Callable[[], nn.Module]]]) -> tuple[list[Row], dict[str, str]]:
    """Rows of the architectures, one each, and those that no family builds with the first reason."""
    rows, unbuilt = dict[str, Row](), dict[str, str]()
    for name, family, make in candidates:
        if name in rows:
            continue
        try:
            rows[name] = row(name, make, family)
            unbuilt.pop(name, None)
            print(*rows[name], flush=True)
        except NotBuiltError as error:
            unbuilt.setdefault(name, str(error))
            print(name, family, "not built:", error, flush=True)
    return list(rows.values()), unbuilt


def result(rows: Sequence[Row], unbuilt: Mapping[str, str]) -> list[str]:
    """Lines of the result: how many, what failed, the table, and what was not built."""
    families = ", ".join(f"{number} {family}" for family, number in Counter(each.family for each in rows).items())
    failed = [each for each in rows if each.problem]
    head = f"{len(rows)} architectures, each once ({families}); {len(failed)} failed that run without octavo."
    columns = ["architecture", "family", "linear layers", "octavo", "problem", "largest weight that stays"]
    cells = [[r.name, r.family, f"{r.before:.2f}", f"{r.after:.2f}", r.problem or "none", r.left] for r in rows]
    reasons = [f"- {name}: {reason}" for name, reason in unbuilt.items()]
    missing = f"Not built, with the plain model's reason: {len(unbuilt)}."
    return [head, "", *markdown_table(columns, cells), "", missing, "", *reasons]


def main() -> None:
    """Print the table and write it; the exit code is 1 if an architecture failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--all", action="store_true", help="also every other architecture of the families")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one in N of them, for a quick run")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    machine = hardware()
    makers: list[tuple[str, str, Callable[[], nn.Module]]] = [(name, "causal", partial(build, name)) for name in MODELS]
    only = arguments.only.split(",") if arguments.only else []
    makers += list(every_model()) if arguments.all or set(only) - MODELS.keys() else []
    names = only or [name for name, *_ in makers]
    if unknown := set(names) - {name for name, *_ in makers}:
        parser.error(f"no architecture is called {', '.join(sorted(unknown))}")
    rows, unbuilt = measure_all([each for each in makers if each[0] in names][:: arguments.every])
    title = "Share of the forward's multiplications in FP8, by architecture"
    publish("model_zoo", result(rows, unbuilt), title=title, machine=machine, write=not arguments.no_write)
    sys.exit(int(any(each.problem for each in rows)))


if __name__ == "__main__":
    main()
