"""octavo's server under another engine's profile: the trainer's log-probabilities, bit for bit, however it is asked."""

import copy
from dataclasses import replace

import pytest
import torch

import octavo
from octavo.engines import FP8_CACHE, EngineCast, RowByRow, convert_as_served, get, model_as
from octavo.engines.model import watching
from octavo.engines.token_scores import text_log_probabilities
from octavo.errors import BackendError, ConfigError
from octavo.export import save_quantized
from octavo.formats import BF16, FP32
from octavo.inference import Engine, EngineConfig, Event, ProfileRunner, SamplingParams, load_served_model_as
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.numerics import PerRow
from octavo.recipes.engines import forward_recipe
from octavo.rl import log_probs
from tests.tiny_llama import tiny_llama_config

PROVEN = ("vllm-token", "sglang-block", "te-block")
FP32_SUMS = ("octavo-token", "te-mxfp8")
DECODED = "compressed-tensors"
LENGTHS = (70, 33, 3)


def decoder(**changes):
    """Of widths that are no multiple of a vector, with logits that are not flat."""
    shape = {"vocab_size": 256, "hidden_size": 72, "intermediate_size": 136, "num_heads": 6, "max_positions": 128}
    model = Llama(tiny_llama_config(**shape | changes), seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="module")
def model():
    return decoder()


@pytest.fixture(scope="module")
def texts():
    return [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def answers(runner, tokenizer, prompts, *, step_rows=7, tokens=6):
    """Texts that a server gives for prompts at once, and the log-probability of all their tokens but the first."""
    config = EngineConfig(
        cache_format=runner.cache_format, cache_positions=512, max_running=4, step_rows=step_rows, max_waiting=16
    )
    engine, told = Engine(runner, tokenizer, config=config), [list[Event]() for _ in prompts]
    for seed, (prompt, events) in enumerate(zip(prompts, told, strict=True)):
        params = SamplingParams(max_tokens=tokens, seed=seed, logprobs=0, prompt_logprobs=True)
        engine.submit(prompt, params, events.append)
    while engine.step():
        pass
    found = []
    for prompt, events in zip(prompts, told, strict=True):
        logprobs = [token.logprob for token in events[0].prompt] + [event.logprob for event in events]
        assert len(logprobs) == len(prompt) - 1 + tokens
        found.append(([*prompt, *(event.token for event in events)], logprobs))
    return found


@pytest.mark.parametrize("name", [*PROVEN, *FP32_SUMS, DECODED])
def test_log_probabilities_are_the_engines(model, texts, byte_tokenizer, name):
    """Prompts in chunks, in company, and the tokens that are drawn: those of one pass over the whole text."""
    for tokens, logprobs in answers(ProfileRunner(model, name), byte_tokenizer, texts):
        assert logprobs == log_probs(model, torch.tensor([tokens]), profile=name)[0].tolist()


@pytest.mark.parametrize("name", [*PROVEN, "octavo-token"])
def test_log_probabilities_are_the_trainers(model, texts, byte_tokenizer, name):
    trained = copy.deepcopy(model)
    context = convert_as_served(trained, get(name), gradients="rowwise")
    for tokens, logprobs in answers(ProfileRunner(model, name), byte_tokenizer, texts):
        with context, RowByRow():
            logits = trained.train()(torch.tensor([tokens]))[0, :-1]
        assert logits.requires_grad
        assert logprobs == text_log_probabilities(logits.detach(), torch.tensor(tokens[1:])).tolist()


@pytest.mark.parametrize("name", [*PROVEN, "octavo-token"])
def test_log_probabilities_are_those_of_a_pass_for_each_token(model, texts, byte_tokenizer, name):
    (tokens, logprobs), *_ = answers(ProfileRunner(model, name), byte_tokenizer, texts[1:])
    with RowByRow():
        logits = model_as(model, get(name)).stepwise(torch.tensor([tokens[:-1]]))[0]
    assert logprobs == text_log_probabilities(logits, torch.tensor(tokens[1:])).tolist()


@pytest.mark.parametrize("name", ["vllm-token", "octavo-token"])
def test_company_chunks_and_reused_pages_change_no_bit(model, texts, byte_tokenizer, name):
    runner = ProfileRunner(model, name)
    together = answers(runner, byte_tokenizer, texts)
    alone = answers(runner, byte_tokenizer, texts[:1], step_rows=30)
    assert together[0] == alone[0]
    engine = Engine(runner, byte_tokenizer, config=EngineConfig(cache_format=runner.cache_format, cache_positions=512))
    drawn = []
    for _ in range(2):
        events = list[Event]()
        engine.submit(texts[0], SamplingParams(max_tokens=6, seed=0, logprobs=0), events.append)
        while engine.step():
            pass
        drawn.append(([event.token for event in events], [event.logprob for event in events]))
    assert engine.metrics.reused_tokens == 64
    assert drawn[0] == drawn[1] == (alone[0][0][-6:], alone[0][1][-6:])


@pytest.mark.parametrize("cast", [EngineCast(granularity=PerRow()), FP8_CACHE], ids=["row", "one"])
def test_keys_and_values_are_cast_as_the_profile_says(model, texts, byte_tokenizer, cast):
    profile = replace(get("vllm-token"), kv_cache=cast)
    runner = ProfileRunner(model, profile)
    assert runner.cache_format == BF16
    for tokens, logprobs in answers(runner, byte_tokenizer, texts):
        ids = torch.tensor([tokens])
        assert logprobs == log_probs(model, ids, profile=profile)[0].tolist()
        assert logprobs != log_probs(model, ids, profile="vllm-token")[0].tolist()


def test_a_mixture_of_experts(texts, byte_tokenizer):
    sizes = {"num_experts": 4, "experts_per_token": 2, "intermediate_size": 72, "qk_norm": "head", "shared_size": 40}
    mixture = decoder(num_layers=1, **sizes)
    for tokens, logprobs in answers(ProfileRunner(mixture, "sglang-block"), byte_tokenizer, texts):
        assert logprobs == log_probs(mixture, torch.tensor([tokens]), profile="sglang-block")[0].tolist()


def test_static_scales_of_the_model(model, texts, byte_tokenizer):
    """Found on too short a text, so that some elements are clipped."""
    calibrated = copy.deepcopy(model)
    octavo.calibrate(calibrated, [torch.arange(8)[None]]).apply(calibrated, hold_weights=True)
    runner, engine = ProfileRunner(calibrated, "vllm-tensor"), model_as(calibrated, get("vllm-tensor"))
    ((tokens, logprobs),), saturated = answers(runner, byte_tokenizer, texts[-1:]), list[int]()
    scales = {path: float(layer.input_scale) for path, layer in engine.layers.items() if layer.input_scale is not None}

    def see(path, x, _):
        saturated.append(int((x.double().abs() > 464 * scales[path]).sum()))

    with watching(engine.layers, see):  # of the model, where log_probs(profile="vllm-tensor") measures scales
        assert logprobs == log_probs(engine, torch.tensor([tokens]))[0].tolist()
    inputs = 3 * 72 + 72 + 2 * 72 + 136
    assert runner.saturation.elements == (len(tokens) - 1) * model.config.num_layers * inputs
    assert runner.saturation.saturated == sum(saturated) > 0


def test_a_folder_for_an_engine_has_the_numbers_of_its_source(model, tmp_path, byte_tokenizer, texts):
    made = LanguageModel(model=copy.deepcopy(model), tokenizer=byte_tokenizer, context=128, source="made")
    for parameter in made.model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as octavo export --for does
    octavo.convert(made.model, forward_recipe(get("vllm-token")))
    save_quantized(made, tmp_path, verify_folder=False)
    served = load_served_model_as(tmp_path, "vllm-token")
    assert served.runner.profile == get("vllm-token")
    (tokens, logprobs), *_ = answers(served.runner, served.tokenizer, texts[1:])
    assert logprobs == log_probs(model, torch.tensor([tokens]), profile="vllm-token")[0].tolist()


SHARED = "tokens share a scale of its {}, so an answer would depend on other requests"


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ("vllm-tokn", r"there is no engine 'vllm-tokn' \(did you mean 'vllm-token'\?\)"),
        ("te-current", SHARED.format("inputs")),
        ("torchao-tensorwise", SHARED.format("inputs")),
        (replace(get("vllm-token"), kv_cache=EngineCast()), SHARED.format("KV cache")),
        ("te-delayed", "the scales of its inputs are from past steps, which a server has not"),
        ("vllm-tensor", "this model has none; serve a folder of octavo export --for vllm-tensor --calibration FOLDER"),
        (replace(get("vllm-token"), activations=torch.float16), "a cache holds BF16 or FP32, not torch.float16"),
    ],
    ids=lambda value: getattr(value, "name", value)[:12],
)
def test_profiles_that_cannot_serve(model, profile, says):
    with pytest.raises(ConfigError, match=says):
        ProfileRunner(model, profile)


def test_the_cache_of_another_format_or_model_is_refused(model, byte_tokenizer):
    runner, at = ProfileRunner(model, "vllm-token"), torch.arange(2)
    with pytest.raises(ConfigError, match="vllm-token keeps keys and values in BF16, not in E4M3; give the runner's"):
        Engine(runner, byte_tokenizer)
    with pytest.raises(ConfigError, match="not in FP32"):
        runner.new_batch(1, fmt=FP32)
    other = ProfileRunner(decoder(num_layers=1), "vllm-token").new_batch(1).tensors
    with pytest.raises(BackendError, match="this cache is for 1 layers"):
        runner.read_rows(at, other, sequence=0 * at, position=at, num_logits=1)
    with pytest.raises(BackendError, match="rows with logits must be from 1 to 2, not 3"):
        runner.read_rows(at, runner.new_batch(1).tensors, sequence=0 * at, position=at, num_logits=3)
