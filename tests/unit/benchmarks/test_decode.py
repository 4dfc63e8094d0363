"""The generation benchmark: its generators say the same, its bars judge made-up times, its perplexities are means."""

import math
import sys
from typing import Any

import pytest
import torch

from benchmarks import decode, smollm2
from benchmarks.cpu_kernels import Bound, Contestant
from benchmarks.decode import FULL, HALF, KERNELS, OURS, PLAIN, Q8_0, REFERENCE, WINDOW
from benchmarks.generators import LlamaCpp, Octavo, Plain, Transformers, q8_0_of
from octavo.errors import BackendError
from octavo.formats import BF16, E4M3, FP32
from octavo.inference import ModelRunner
from octavo.kernels import native_bindings
from octavo.models import Llama, load_gguf
from tests.tiny_llama import tiny_llama_config
from tests.unit.models import small_gguf

SHAPE = tiny_llama_config(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_heads=2,
    num_kv_heads=1,
    max_positions=WINDOW,
    rope_theta=500.0,
    tie_embeddings=True,
)
TOKENS = [5, 17, 3, 90, 44, 8, 8, 61]


@pytest.fixture
def model():
    """Codes decode to its weights."""
    return decode.decoded(Llama(SHAPE, seed=0))


class Counting:
    """A generator whose likeliest token is the next number; notes what it read."""

    def __init__(self):
        self.read: list[int] = []

    def rewind(self, length):
        assert length <= len(self.read)
        del self.read[length:]

    def logits(self, tokens, *, every=False):
        self.read += tokens
        found = torch.nn.functional.one_hot(torch.tensor(tokens) + 1, 1000).float()
        return found if every else found[-1]


def check_reads_on_and_goes_back(generator, expected, **tolerance):
    """``generator`` gives the ``expected`` logits [T, V] of ``TOKENS``, however they are cut."""
    generator.rewind(0)
    torch.testing.assert_close(generator.logits(TOKENS, every=True), expected, **tolerance)
    generator.rewind(3)
    torch.testing.assert_close(generator.logits(TOKENS[3:5]), expected[4], **tolerance)
    torch.testing.assert_close(generator.logits(TOKENS[5:], every=True), expected[5:], **tolerance)
    generator.rewind(len(TOKENS) - 1)
    torch.testing.assert_close(generator.logits(TOKENS[-1:]), expected[-1], **tolerance)


def test_all_generators_have_the_same_weights(model):
    expected = Plain(model).logits(TOKENS, every=True)
    assert torch.equal(Plain(model).logits(TOKENS), expected[-1])
    check_reads_on_and_goes_back(Octavo(ModelRunner(model), 64, FP32), expected, rtol=1e-4, atol=1e-5)
    check_reads_on_and_goes_back(Octavo(ModelRunner(model, level="torch"), 64, FP32), expected, rtol=1e-4, atol=1e-5)
    check_reads_on_and_goes_back(Octavo(ModelRunner(model), 64, E4M3), expected, rtol=0.1, atol=0.02)
    pytest.importorskip("transformers", reason="transformers is not installed")
    check_reads_on_and_goes_back(Transformers(model, torch.float32), expected, rtol=1e-4, atol=1e-5)
    check_reads_on_and_goes_back(Transformers(model, torch.bfloat16), expected, rtol=0.1, atol=0.02)


def test_llama_cpp_has_the_same_weights_too(tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = small_gguf.write(tmp_path / "model.Q4_1.gguf", encoding="Q4_1", settings={"llama.context_length": WINDOW})
    q8_0 = q8_0_of(path, 1)
    assert q8_0 == q8_0_of(path, 1) == tmp_path / "model.Q8_0.gguf"
    assert sorted(tmp_path.iterdir()) == [path, q8_0]
    expected = Plain(load_gguf(q8_0).model).logits(TOKENS, every=True)
    peer = LlamaCpp(q8_0, 64, 1)
    check_reads_on_and_goes_back(peer, expected, rtol=0, atol=0.3)  # of logits around 2: it casts activations to 8 bits
    assert peer.facts().startswith("llama-cpp-python ")
    with pytest.raises(BackendError, match="cannot load"):
        LlamaCpp(tmp_path / "none.gguf", 64, 1)
    with pytest.raises(BackendError, match="cannot make a Q8_0 file"):
        q8_0_of(tmp_path / "none.gguf", 1)


def test_missing_llama_cpp_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(BackendError, match="pip install llama-cpp-python"):
        LlamaCpp(tmp_path / "model.gguf", 64, 1)


def test_a_position_takes_its_keys_and_values():
    runner = ModelRunner(Llama(SHAPE))
    assert Octavo(runner, 64).position_bytes == 2 * 2 * (32 + 2)
    assert Octavo(runner, 64, BF16).position_bytes == 2 * 2 * 32 * 2


def test_decoding_takes_the_likeliest_after_the_prompt_every_time():
    generator = Counting()
    run = decode.decoding(generator, [1, 2, 3], 4)
    assert run() == [4, 5, 6, 7, 8]
    decode.prefilling(generator, [1, 2, 3, 9, 9])()
    assert generator.read == [1, 2, 3, 9, 9]
    assert run() == [4, 5, 6, 7, 8]
    assert generator.read == [1, 2, 3, 4, 5, 6, 7]


def test_speeds_and_bars_are_by_the_token():
    bounds = (Bound(("read",)), Bound(("theirs",), 1.5))
    entered = {
        "read": Contestant(list, 1, "tokens/s"),
        "theirs": Contestant(list, 8, "tokens/s"),
        "ours": Contestant(list, 128, "tokens/s", bounds),
    }
    lines = decode.speed_lines(entered, {"read": [0.5] * 3, "theirs": [16.0] * 3, "ours": [128.0] * 3})
    assert lines[4:8] == [
        "| ours | 1.0 tokens/s | read | 0.50 (0.50–0.50) |  |  |",
        "| ours | 1.0 tokens/s | theirs | 2.00 (2.00–2.00) | 1.5 | met |",
        "",
        "1 of 1 bars met.",
    ]
    assert lines[2] == "| read | 2.0 tokens/s |  |  |  |  |"
    assert "Median of 3 interleaved rounds" in lines[-1]


def test_everything_the_bars_name_is_timed_and_runs(model, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(decode, "NEW", 4)
    peer: Any = Octavo(ModelRunner(model), WINDOW)
    entered = decode.contestants(model, peer, 10_000_000, [i % 96 for i in range(WINDOW)])
    named = {name for entry in entered.values() for bound in entry.bounds for name in bound.names}
    assert named <= entered.keys()
    compared = [name for name in entered if name.startswith(("decode", "prefill"))]
    assert compared == [f"{what}, {who}" for what in ("decode", "prefill") for who in (OURS, Q8_0, HALF, FULL)]
    bars = [bound.least for entry in entered.values() for bound in entry.bounds if bound.least]
    assert bars == [1.5, 3.0, 2.0, 0.9]
    sizes = [name for name in entered if name.startswith("read")]
    weights = ModelRunner(model).weight_bytes
    positions = decode.PROMPT + 4 // 2
    assert sizes == [f"read {size / 1e6:.1f} MB, a token's" for size in
                     (weights + positions * 132, 10_000_000 + positions * 256)]  # fmt: skip
    for entry in entered.values():
        entry.run()


def test_a_windows_loss_is_that_of_its_tokens_but_the_first(model):
    window = [3, 1, 4, 1, 5]
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(torch.tensor([window[:4]]))[0], torch.tensor(window[1:]))
    assert math.isclose(decode.window_loss(Plain(model), window), float(expected), rel_tol=1e-6)
    assert decode.windows_of(range(1100), 2) == [range(512), range(512, 1024)]


def test_perplexities_and_what_the_kernels_change(model):
    peer: Any = Plain(model)
    losses = decode.window_losses(model, peer, [TOKENS, TOKENS[::-1]])
    assert losses[PLAIN, "FP32", "FP32"] == losses[PLAIN, "FP8", "FP32"]  # its weights are codes' already
    lines = decode.perplexity_lines(losses)
    assert len(lines[2:8]) == len(losses)
    full = math.exp(sum(losses[PLAIN, "FP32", "FP32"]) / 2)
    assert lines[2] == f"| {PLAIN} | FP32 | FP32 | {full:.4f} |  |"
    assert lines[3] == f"| {PLAIN} | FP8 | FP32 | {full:.4f} | +0.0000 ± 0.0000 |"
    assert f"{KERNELS}, FP32 cache, against {PLAIN}: unchanged" in lines[-3]
    assert f"{KERNELS}, FP8 cache, against {REFERENCE}: unchanged" in lines[-1]


@pytest.mark.parametrize(
    ("kept", "by", "gaps", "verdict"),
    [
        ("FP32", PLAIN, [2e-5, 2e-5], "CHANGED, +2.0e-05 nats (bound 1.0e-05), at most 2.0e-05 in a window."),
        ("FP32", PLAIN, [5e-4, -5e-4], "unchanged, +0.0e+00 nats (bound 1.0e-05), at most 5.0e-04 in a window."),
        ("FP8", REFERENCE, [1e-3, 3e-3], "unchanged, +2.0e-03 nats (bound 3.0e-03), at most 3.0e-03 in a window."),
        ("FP8", REFERENCE, [2e-3, 3e-3], "CHANGED, +2.5e-03 nats (bound 1.5e-03), at most 3.0e-03 in a window."),
    ],
)
def test_kernels_that_change_results_are_reported(kept, by, gaps, verdict):
    names = [(PLAIN, "FP32", "FP32"), (PLAIN, "FP8", "FP32"), (KERNELS, "FP8", "FP32"), (REFERENCE, "FP8", "FP8")]
    losses = {name: [2.0, 4.0] for name in [*names, (KERNELS, "FP8", "FP8")]}
    losses[KERNELS, "FP8", kept] = [2.0 + gaps[0], 4.0 + gaps[1]]
    line = decode.perplexity_lines(losses)[-3 if kept == "FP32" else -1]
    assert line == f"{KERNELS}, {kept} cache, against {by}: {verdict}"


def test_bytes_of_a_file_are_its_tensors(tmp_path):
    path = small_gguf.write(tmp_path / "model.gguf")
    assert decode.weight_bytes(path) == sum(tensor.nbytes for tensor in small_gguf.weights().values())


def test_missing_model_or_library_ends_with_one_sentence(monkeypatch, capsys):
    def missing():
        raise BackendError("llama-cpp-python is not installed")

    monkeypatch.setattr(sys, "argv", ["decode"])
    monkeypatch.setattr(native_bindings, "_absence", None)
    monkeypatch.setattr(smollm2, "model_path", missing)
    with pytest.raises(SystemExit):
        decode.main()
    assert capsys.readouterr().err == "llama-cpp-python is not installed\n"
    monkeypatch.setattr(native_bindings, "_absence", "not built")
    with pytest.raises(SystemExit):
        decode.main()
    assert "no native kernels to time: not built" in capsys.readouterr().err
