"""Rollouts under a profile in a real GRPOTrainer of TRL."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from octavo.compat.trl import MismatchCallback, ProfileRollouts  # noqa: E402 (needs transformers)
from octavo.engines import get, model_as  # noqa: E402
from octavo.rl import log_probs  # noqa: E402
from tests.tiny_llama import tiny_hugging_face_config  # noqa: E402

# trl 1.16 still uses names that transformers 5.23 deprecates, and its rollout_func is experimental.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]
WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklm"]


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Split("", "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def trainer_of(folder, rollouts, temperature=1.0):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(tiny_hugging_face_config(vocab_size=len(WORDS), num_hidden_layers=1))
    prompts = datasets.Dataset.from_dict({"prompt": ["abc", "de", "fgh", "a"] * 2})
    settings = trl.GRPOConfig(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=4, num_generations=4, use_cpu=True,
        max_completion_length=5, logging_steps=1, report_to=[], disable_tqdm=True, bf16=False, learning_rate=0.01,
        temperature=temperature,
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=model, args=settings, train_dataset=prompts, processing_class=tokenizer(), rollout_func=rollouts,
        reward_funcs=lambda completions, **_: [float(text.count("a")) for text in completions],
        callbacks=[MismatchCallback(rollouts.monitor)],
    )  # fmt: skip


def test_a_trainer_draws_under_the_profile_and_logs_the_mismatch(tmp_path):
    rollouts = ProfileRollouts("vllm-token")
    trainer = trainer_of(tmp_path, rollouts)
    trainer.train()
    logged = [line["mismatch/k3"] for line in trainer.state.log_history if "loss" in line]
    assert logged == [found.k3.estimate for found in rollouts.monitor.history]
    assert len(logged) == 3
    assert all(value > 0 for value in logged)


def test_returned_log_probabilities_are_those_of_the_profile(tmp_path):
    rollouts = ProfileRollouts("vllm-token")
    trainer = trainer_of(tmp_path, rollouts)
    prompts = ["abc", "abc", "de", "f"]
    drawn = rollouts(prompts, trainer)
    engine = model_as(trainer.model, get("vllm-token"))
    for prompt, ids, logprobs in zip(drawn["prompt_ids"], drawn["completion_ids"], drawn["logprobs"], strict=True):
        expected = log_probs(engine, torch.tensor([prompt + ids]))[0, len(prompt) - 1 :]
        assert torch.equal(torch.tensor(logprobs, dtype=torch.float64), expected / 1.0)
    assert [len(ids) for ids in drawn["prompt_ids"]] == [3, 3, 2, 1]


def test_messages_are_rendered_by_the_chat_template(tmp_path):
    rollouts = ProfileRollouts("vllm-token")
    trainer = trainer_of(tmp_path, rollouts)
    trainer.processing_class.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    drawn = rollouts([[{"role": "user", "content": "abc"}]], trainer)
    assert drawn["prompt_ids"] == [trainer.processing_class("abc")["input_ids"]]


def test_both_log_probabilities_are_at_the_temperature(tmp_path):
    rollouts = ProfileRollouts("vllm-token")
    trainer = trainer_of(tmp_path, rollouts, temperature=0.3)
    trainer.model.eval()
    drawn = rollouts(["abc", "abc"], trainer)
    texts = zip(drawn["prompt_ids"], drawn["completion_ids"], drawn["logprobs"], strict=True)
    log_ratios = []
    for prompt, ids, logprobs in texts:
        with torch.no_grad():
            logits = trainer.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
        own = (logits / 0.3).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        log_ratios.append(own - torch.tensor(logprobs, dtype=torch.float64))
    (found,) = rollouts.monitor.history
    assert found.k1 == pytest.approx(-float(torch.cat(log_ratios).mean()), abs=1e-7)
