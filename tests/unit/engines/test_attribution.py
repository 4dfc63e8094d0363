"""Attribution: each property's effect is that of two engines that differ in it alone, and faults are named."""

import json
import random
from functools import reduce

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel

import octavo
from octavo import recipes
from octavo.engines import (
    PROFILES,
    TriedChanges,
    agree,
    attribute,
    find_suspects,
    get,
    model_as,
    neighbours,
    read_server_logprobs,
    server_settings,
    with_property,
)
from octavo.engines.model import copies_for
from octavo.engines.properties import is_proven
from octavo.engines.summary import possible_in_words
from octavo.engines.suspects import AS_CLAIMED
from octavo.engines.token_scores import text_log_probabilities
from octavo.errors import ConfigError, DataError
from tests.unit.quantization.tiny_models import language_model, windows

TOKENS = windows(2, 20)
CLAIMED = ("vllm-block", "te-current", "vllm-token", "compressed-tensors")


@pytest.fixture(scope="module")
def model():
    return language_model()


@pytest.fixture(scope="module")
def attribution(model):
    return attribute(model, agree(model, "te-block", "vllm-block", TOKENS, max_kl=1e-6), TOKENS)


def test_effects_are_those_of_engines_that_differ_in_one_property(model, attribution):
    effects = {effect.name: effect for effect in attribution.effects}
    assert next(iter(effects)).endswith("power_of_two")
    trainer, server = get("te-block"), get("vllm-block")
    for name in ("input.power_of_two", "input.division"):
        changed = with_property(trainer, name, server)
        alone = agree(model, trainer, changed, TOKENS)
        assert effects[name].alone.estimate == pytest.approx(alone.kl.estimate, abs=1e-15)
        assert effects[name].remaining.estimate == pytest.approx(agree(model, changed, server, TOKENS).kl.estimate)
        squares = [layer.errors[0] ** 2 for layer in alone.layers]
        assert effects[name].layer_error == pytest.approx((sum(squares) / len(squares)) ** 0.5)
    total = agree(model, trainer, server, TOKENS).kl.estimate
    assert attribution.total.estimate == pytest.approx(total)
    assert attribution.interactions == pytest.approx(total - sum(each.alone.estimate for each in attribution.effects))


def test_properties_of_zeros_and_nan_are_worth_nothing_here(attribution):
    effects = {effect.name: effect for effect in attribution.effects}
    for name in ("input.zero_scale", "input.amax_floor", "input.nonfinite_scale", "weight.infinite_encode"):
        assert effects[name].layer_error == effects[name].alone.estimate == 0


def test_an_effect_is_proven_if_both_engines_values_are(attribution):
    sides = {
        effect.name: tuple(is_proven(get(engine), effect.name) for engine in ("te-block", "vllm-block"))
        for effect in attribution.effects
    }
    assert set(sides.values()) == {(False, False), (False, True), (True, False), (True, True)}
    assert {effect.name for effect in attribution.effects if effect.is_proven} == {
        name for name, proofs in sides.items() if proofs == (True, True)
    }


def test_the_path_makes_properties_equal_until_the_bar_is_met(model, attribution):
    *before, last = attribution.path
    remaining = {effect.name: effect.remaining.estimate for effect in attribution.effects}
    left = [remaining[name] for name in last.properties]
    assert len(set(left)) > 1
    assert left == sorted(left)  # that which leaves least comes first
    assert all(min(each.on_trainer, each.on_server) > 1e-6 for each in before)
    assert min(last.on_trainer, last.on_server) <= 1e-6
    assert [len(each.properties) for each in attribution.path] == list(range(1, len(attribution.path) + 1))
    met = agree(model, "te-block", "vllm-block", TOKENS, max_kl=1.0)
    assert attribute(model, met, TOKENS[:1]).path == ()


def test_no_swap_of_a_path_is_unneeded(model):
    """Of seven properties that differ, floors and zeros change no number of this text: they must not be listed."""
    trainer, server = get("sglang-block"), get("transformers-fp8")
    (*_, last) = attribute(model, agree(model, trainer, server, TOKENS, max_kl=1e-9), TOKENS).path
    assert min(last.on_trainer, last.on_server) <= 1e-9
    is_trainer = last.on_trainer <= 1e-9
    side, other = (trainer, server) if is_trainer else (server, trainer)
    for name in last.properties:
        others = [each for each in last.properties if each != name]
        changed = reduce(lambda profile, each: with_property(profile, each, other), others, side)
        pair = (changed, server) if is_trainer else (trainer, changed)
        assert agree(model, *pair, TOKENS).kl.estimate > 1e-9, name


def test_one_window_tells_what_changes_nothing(model):
    found = attribute(model, agree(model, "te-block", "vllm-block", TOKENS[:1]), TOKENS[:1])
    nothing = {effect.name for effect in found.effects if effect.changes_nothing}
    assert {"input.zero_scale", "input.amax_floor", "input.nonfinite_scale"} <= nothing
    assert "input.power_of_two" not in nothing


def test_what_no_engine_can_have_alone_is_said(model):
    found = attribute(model, agree(model, "vllm-token", "vllm-fnuz", TOKENS[:1]), TOKENS[:1])
    assert set(found.inseparable) == {"weight.format", "input.format"}


def faults(name):
    """Changes of one property that change a number on the text, and those that do not."""
    claimed = get(name)
    return list(neighbours(claimed, PROFILES.values()))


def served(model, profile):
    engine = model_as(model.model, profile, input_amaxes={path: torch.tensor(4.0) for path in paths(model)})
    return tuple(text_log_probabilities(engine(window[None, :-1])[0], window[1:]) for window in TOKENS)


def paths(model):
    return [path for path, layer in model.model.named_modules() if isinstance(layer, torch.nn.Linear)]


@pytest.mark.long
@pytest.mark.parametrize("name", CLAIMED)
def test_a_fault_is_named_in_every_trial(model, name):
    draw, trials = random.Random(0), 0
    right = served(model, get(name))
    candidates = [each for each in faults(name) if "scaling" not in each[0] and "granularity" not in each[0]]
    draw.shuffle(candidates)
    for prop, value, profile in candidates:
        try:
            logprobs = served(model, profile)
        except Exception:  # noqa: BLE001 (no kernel has such a combination)
            continue
        if all(map(torch.equal, logprobs, right)):
            continue
        best, runner_up, *_ = find_suspects(model, get(name), TOKENS, logprobs).ranked
        assert (prop, value) in best.changes
        assert best.is_exact
        assert AS_CLAIMED not in best.properties
        assert not runner_up.is_exact
        trials += 1
        if trials == 5:
            return
    pytest.fail(f"only {trials} faults change a number")


@pytest.mark.parametrize("name", ["vllm-block", "vllm-tensor"])
def test_what_users_choose_on_a_server_is_named(model, name):
    """An FP8 cache, the head in FP8, and each kind of layer in high precision, and nothing else beside it."""
    copies = copies_for(model, [get(name)], TOKENS)
    for setting, value, profile in server_settings(copies, get(name)):
        engine = copies.of(profile)
        logprobs = [text_log_probabilities(engine(window[None, :-1])[0], window[1:]) for window in TOKENS]
        best, *_ = find_suspects(model, get(name), TOKENS, logprobs, catalogue=[]).ranked
        assert best.is_exact
        assert best.changes == ((setting, value),)


def test_a_cache_with_the_scale_1_holds_torchs_codes(model):
    copies = copies_for(model, [get("vllm-token")], TOKENS)
    (_, _, profile), *_ = server_settings(copies, get("vllm-token"))
    transform = model_as(model.model, profile).kv_transform
    x = torch.randn(1, 9, 2, 8) * 100
    assert transform is not None
    keys, values = transform(0, x, x.bfloat16())
    assert torch.equal(keys, x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert torch.equal(values, x.bfloat16().float().clamp(-448, 448).to(torch.float8_e4m3fn).bfloat16())


def test_a_server_as_claimed_is_found_so(model):
    logprobs = [scores + 2e-6 for scores in served(model, get("vllm-token"))]
    found = find_suspects(model, get("vllm-token"), TOKENS, logprobs[:1], catalogue=[get("te-current")])
    best, *_ = found.ranked
    assert best.is_exact
    assert best.properties[0] == AS_CLAIMED


def one_right_of_eight(generator, effect, windows=25, noise=0.1):
    """A server with noise of its own, and eight changes: the server's, and others that are off by ``effect``."""
    true = -torch.rand(20 * windows, generator=generator).double() - 10
    groups = [
        ((("property", str(index)),), true + index * effect * torch.randn(len(true), generator=generator))
        for index in range(8)
    ]
    tried = TriedChanges(groups=tuple(groups), untried=())
    return tried.suspects((true + noise * torch.randn(len(true), generator=generator)).split(20))


def test_a_change_that_stands_out_of_the_noise_is_the_only_possible_one():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        found = one_right_of_eight(generator, effect=0.2)
        assert [each.changes for each in found.possible] == [(("property", "0"),)]
        assert found.ranked[1].behind.low > 0
        assert possible_in_words(found).startswith("The text excludes all but the first of 8 tried (95 %")


def test_the_right_change_is_possible_in_about_95_of_100():
    """Effects from far below the noise to its size."""
    generator, missed = torch.Generator().manual_seed(0), 0
    for trial in range(400):
        found = one_right_of_eight(generator, effect=0.1 * 2.0 ** -(trial % 8))
        missed += (("property", "0"),) not in [each.changes for each in found.possible]
    assert missed <= 0.05 * 400


@pytest.mark.parametrize("seed", range(60))
def test_possible_changes_are_those_of_paired_tests_over_windows(seed):
    """Against scipy's paired test, one-sided, with Holm's correction written out."""
    drawn = np.random.default_rng(seed)
    shared, own = drawn.exponential(0.3, (1, 6)), drawn.exponential(0.03, (7, 6))
    deltas = shared + own + drawn.choice([0.0, 0.02, 0.05], (7, 1))  # mean |Δ log p| by change and window
    spread = np.array([0.5, 1.0, 1.5])  # of the tokens of a window
    groups = tuple(
        ((("property", str(index)),), torch.tensor(np.outer(row, spread).ravel() - 10))
        for index, row in enumerate(deltas)
    )
    found = TriedChanges(groups=groups, untried=()).suspects(torch.full((18,), -10.0).split(3))
    order = np.argsort(deltas.mean(1))
    p_values = [ttest_rel(deltas[each], deltas[order[0]], alternative="greater").pvalue for each in order[1:]]
    excluded, worst = set(), 0.0
    for rank, place in enumerate(np.argsort(p_values)):
        worst = max(worst, (6 - rank) * p_values[place])
        excluded |= {order[1 + place]} if worst < 0.05 else set()
    assert [each.changes for each in found.ranked] == [(("property", str(each)),) for each in order]
    assert [each.is_possible for each in found.ranked] == [each not in excluded for each in order]
    for suspect, index in zip(found.ranked, order, strict=True):
        assert suspect.behind.estimate == pytest.approx((deltas[index] - deltas[order[0]]).mean(), abs=1e-9)
        assert suspect.mean_delta == pytest.approx(deltas[index].mean())


def test_only_exact_matches_are_possible_beside_an_exact_one():
    found = one_right_of_eight(torch.Generator().manual_seed(0), effect=1e-4, noise=1e-8)
    assert found.ranked[0].is_exact
    assert [each.changes for each in found.possible] == [(("property", "0"),)]
    found = one_right_of_eight(torch.Generator().manual_seed(0), effect=1e-8, noise=0)
    assert len(found.possible) == 8


def test_one_window_excludes_nothing():
    found = one_right_of_eight(torch.Generator().manual_seed(0), effect=0.2, windows=1)
    assert len(found.possible) == 8


def test_what_a_text_does_not_exclude_is_said():
    generator = torch.Generator().manual_seed(0)
    alike = possible_in_words(one_right_of_eight(generator, effect=0))
    assert alike.startswith("The text does not exclude 8 of 8 tried")
    assert alike.count("property ") == 8
    claimed = -torch.ones(40).double()
    others = [(((f"p{index}", "1"),), claimed + 1e-4 * torch.randn(40, generator=generator)) for index in range(9)]
    tried = TriedChanges(groups=((((AS_CLAIMED, ""),), claimed), *others), untried=())
    found = tried.suspects((claimed - torch.rand(40, generator=generator)).split(20))
    said = possible_in_words(found)
    assert said.startswith("The server may be as claimed. The text does not exclude 10 of 10 tried")
    assert "; and 2 more. More windows" in said


def test_changes_that_no_kernel_computes_are_listed(model):
    """FNUZ codes of one operand alone."""
    found = find_suspects(model, get("vllm-token"), TOKENS, [torch.zeros(19)], catalogue=[get("vllm-fnuz")])
    assert found.untried == (("weight.format", "E4M3_FNUZ; 224"), ("input.format", "E4M3_FNUZ; 224"))
    assert not {"weight.format", "input.format"} & {name for each in found.ranked for name in each.properties}


def test_log_probabilities_of_a_file(tmp_path):
    path = tmp_path / "server.jsonl"
    path.write_text(json.dumps([None, -0.5, -1]) + "\n\n" + json.dumps([-2, 0.0]) + "\n")
    first, second = read_server_logprobs(path)
    assert first.tolist() == [-0.5, -1.0]
    assert second.tolist() == [-2.0, 0.0]
    assert first.dtype is torch.float64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no window"),
        ("[null]", "list of numbers"),
        ("[-1, null]", "list of numbers"),
        ("[-1, true]", "list of numbers"),
        ('{"logprobs": [-1]}', "list of numbers"),
        ("[0.5]", "at most 0"),
        ("[-1", "line 1 .* is no JSON"),
        ("[-1e999]", "is no JSON|at most 0"),
        ("\xff", "not text"),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    path = tmp_path / "server.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=words):
        read_server_logprobs(path)


def test_log_probabilities_of_another_text_are_refused(model):
    with pytest.raises(DataError, match="2 windows of text, and log-probabilities of 3"):
        find_suspects(model, get("vllm-token"), TOKENS, [torch.zeros(19)] * 3)
    with pytest.raises(DataError, match="window 1 has 19 tokens after the first, and 4 log-probabilities"):
        find_suspects(model, get("vllm-token"), TOKENS, [torch.zeros(4)])


def test_other_windows_than_an_agreement_takes_are_refused(model):
    found = agree(model, "te-block", "vllm-block", TOKENS[:1])
    for wrong in (TOKENS[0], TOKENS[:0], TOKENS[:, :1]):
        with pytest.raises(ConfigError, match=r"tokens are \[windows, T\] with at least 2 a window"):
            attribute(model, found, wrong)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 0.5])
def test_what_is_no_log_probability_is_refused(model, wrong):
    second = torch.full((19,), -1.0)
    second[3] = wrong
    with pytest.raises(DataError, match="window 2 must hold log-probabilities: finite numbers of at most 0"):
        find_suspects(model, get("vllm-token"), TOKENS, [torch.full((19,), -1.0), second])


@pytest.mark.parametrize(
    ("recipe", "trainer", "server", "moved"),
    [
        ("tensorwise", "te-current", "vllm-token", {"input.granularity"}),
        ("blockwise", "vllm-block", "vllm-block-ue8m0", {"input.power_of_two"}),
    ],
)
def test_a_folders_codes_leave_the_cast_of_weights_without_effect(recipe, trainer, server, moved):
    plain = language_model().model.requires_grad_(False)
    octavo.convert(plain, recipes.get(recipe), frozen="fp8")
    found = attribute(plain, agree(plain, trainer, server, TOKENS), TOKENS)
    assert not found.inseparable
    effects = {effect.name: effect.changes_nothing for effect in found.effects}
    of_weights = [name for name in effects if name.startswith("weight.")]
    assert of_weights
    assert all(effects[name] for name in of_weights)
    assert not any(effects[name] for name in moved)


def test_a_servers_log_probabilities_may_be_rounded_above_0():
    model = language_model()
    logprobs = [torch.full((TOKENS.shape[1] - 1,), 1e-9)]
    assert find_suspects(model, get("vllm-token"), TOKENS, logprobs, catalogue=[]).ranked
