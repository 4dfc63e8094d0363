"""Share of the forward's multiplications in FP8, by architecture: small configurations of transformers, no weights.

    python -m benchmarks.model_zoo [--only mixtral,gpt2] [--all] [--no-write]

Each model is converted, takes a step of SGD, and is restored; a row fails where the converted model raises and the
plain one does not, where its state_dict is not the same, or where the restored one computes other numbers than before.
"linear layers" is the share with ``nn.Linear`` alone converted, as octavo did before it knew experts and Conv1D.

Counted are the multiplications of one forward by weights, as the operators that ran have them: a token's experts, not
all. Attention's products of activations are left out. ``--all`` adds every other causal language model of transformers
whose small configuration builds.
"""

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import octavo
from benchmarks.measure import hardware, markdown_table, publish
from octavo.convert import other_modules

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
LARGEST = 20_000_000  # parameters of a model that --all builds
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
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


class Row(NamedTuple):
    """One architecture."""

    name: str
    before: float
    after: float
    problem: str
    left: str


def build(name: str) -> nn.Module:
    """Create a model of :data:`MODELS` with random weights."""
    import transformers

    base, options = MODELS[name]
    model_class = getattr(transformers, base if base.endswith("Head") else f"{base}ForCausalLM", None) or getattr(
        transformers, f"{base}Model"
    )
    config_class = model_class.config_class
    given = {**{key: value for key, value in TINY.items() if key not in options}, **options}
    config = config_class(**given)
    torch.manual_seed(0)
    model: nn.Module = model_class(config)
    return model


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


def measured_share(model: nn.Module, tokens: Tensor) -> float:
    """Share of the multiplications of one forward that run in FP8."""
    with torch.no_grad(), Multiplications(model) as counted:
        model(input_ids=tokens)
    return float(counted.share)


def check(model: nn.Module, tokens: Tensor) -> str:
    """Convert, step, restore and compare; what went wrong, or nothing."""
    model.eval()
    with torch.no_grad():
        before = model(input_ids=tokens)[0]
    keys = list(model.state_dict())
    octavo.convert(model, "tensorwise")
    if list(model.state_dict()) != keys:
        return "the state_dict has other keys"
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(input_ids=tokens)[0].float().square().mean().backward()
    if not all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
        return "a gradient is not finite"
    optimizer.step()
    model.load_state_dict(saved)
    octavo.restore(model)
    with torch.no_grad():
        return "" if torch.equal(model(input_ids=tokens)[0], before) else "the restored model computes other numbers"


def row(name: str, make: Callable[[], nn.Module]) -> Row:
    """Measure one architecture."""
    tokens = torch.arange(32).reshape(2, 16) % TINY["vocab_size"]
    model = make().eval()
    linear_alone = copy.deepcopy(model)
    model(input_ids=tokens)[0].float().square().mean().backward()  # what a plain model raises is no failure of octavo's
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models in which nothing is converted
        octavo.convert(linear_alone, "tensorwise", skip=list(other_modules(linear_alone)))
        before = measured_share(linear_alone, tokens)
        converted = copy.deepcopy(model)
        report = octavo.convert(converted, "tensorwise")
        after = measured_share(converted, tokens)
        problem = check(model, tokens)
    named = {f"{path}.weight" for path in (*report.converted, *report.skipped)}
    named |= {*report.parameters, *report.weights}
    matrices = {n for n, p in model.named_parameters() if sum(size > 1 for size in p.shape) > 1}
    if matrices - named:
        problem = problem or f"not in the report: {min(matrices - named)}"
    rest = report.shares.by_path
    largest = max(rest, key=lambda path: rest[path].multiplications, default="")
    return Row(name, before, after, problem, largest)


def every_causal_model() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """All of transformers' causal language models, with the configuration's own names of :data:`TINY`'s sizes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    sizes = {**TINY, **EXPERTS, "use_cache": False, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
    for config_class, model_class in MODEL_FOR_CAUSAL_LM_MAPPING.items():

        def make(config_class: Any = config_class, model_class: Any = model_class) -> nn.Module:
            known = {*config_class().to_dict(), *config_class.attribute_map}
            latent = {**MLA, "head_dim": MLA["qk_rope_head_dim"], "num_key_value_heads": 4}
            own = {**sizes, **(latent if "kv_lora_rank" in known else {})}
            config = config_class(**{k: v for k, v in own.items() if k in known})
            with torch.device("meta"):
                large = sum(p.numel() for p in model_class(config).parameters())
            if large > LARGEST:
                raise ValueError(f"{large:,} parameters: its sizes have names of their own")
            torch.manual_seed(0)
            made: nn.Module = model_class(config)
            return made

        yield config_class.model_type, make


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--all", action="store_true", help="also every other causal language model")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    machine = hardware()
    makers: dict[str, Callable[[], nn.Module]] = {name: partial(build, name) for name in MODELS}
    if arguments.all:
        makers = dict(every_causal_model()) | makers
    names = arguments.only.split(",") if arguments.only else list(makers)
    rows, unbuilt = [], []
    for name in names:
        try:
            rows.append(row(name, makers[name]))
            print(*rows[-1], flush=True)
        except Exception as error:  # noqa: BLE001 (any model may raise anything)
            unbuilt.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            print(unbuilt[-1], flush=True)
    table = markdown_table(
        ["architecture", "linear layers", "octavo", "problem", "largest weight that stays"],
        [[r.name, f"{r.before:.2f}", f"{r.after:.2f}", r.problem or "none", r.left] for r in rows],
    )
    failures = [f"Not built, or failed: {len(unbuilt)}.", "", *(f"- {each}" for each in unbuilt)]
    title = "Share of the forward's multiplications in FP8, by architecture"
    publish("model_zoo", [*table, "", *failures], title=title, machine=machine, write=not arguments.no_write)


if __name__ == "__main__":
    main()
