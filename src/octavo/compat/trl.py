"""Rollouts and the mismatch of engines in TRL's trainers.

:class:`ProfileRollouts` is a ``rollout_func`` that draws completions as another engine would, and compares their
log-probabilities with the policy's; :class:`MismatchCallback` adds the comparison to the trainer's logs.

    rollouts = ProfileRollouts("vllm-block-ue8m0", max_kl=0.01)
    GRPOTrainer(..., rollout_func=rollouts, callbacks=[MismatchCallback(rollouts.monitor)])

Checked with trl 1.16 (``GRPOTrainer``), whose ``rollout_func`` is experimental.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from octavo.recipes.engines import EngineProfile
from octavo.recipes.engines.catalog import resolved
from octavo.rl import MismatchMonitor, log_probs, sample_rollout

__all__ = ["MismatchCallback", "ProfileRollouts"]

Prompt = str | list[dict[str, Any]]


class ProfileRollouts:
    """Draw completions under an engine's profile: a ``rollout_func`` of TRL.

    Length and temperature are those of the trainer's arguments; its top_p, top_k, min_p and repetition_penalty are not
    applied. Neighbours of one length are drawn together, and give an engine with calibrated scales its scales.

    Args:
        profile: the engine that draws, or its name.
        max_kl: bar of the monitor; see :class:`octavo.rl.MismatchMonitor`.
        seed: of the drawn tokens.

    Attributes:
        monitor: its history has one mismatch a call.

    Raises:
        ConfigError: an unknown profile, or a bar that is not above 0.
    """

    def __init__(self, profile: str | EngineProfile, *, max_kl: float | None = None, seed: int = 0) -> None:
        self.profile = resolved(profile)
        self.monitor = MismatchMonitor(max_kl=max_kl)
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, Any]:
        """Completions of the prompts: ``prompt_ids``, ``completion_ids`` and ``logprobs``, lists by prompt."""
        policy, arguments = trainer.accelerator.unwrap_model(trainer.model), trainer.args
        prompt_ids = [_ids(prompt, trainer.processing_class) for prompt in prompts]
        drawn: list[tuple[Tensor, Tensor, Tensor]] = []  # of a prompt: tokens, log-probabilities of server and policy
        for _, neighbours in groupby(prompt_ids, key=len):
            rollout = sample_rollout(
                policy,
                torch.tensor(list(neighbours), device=trainer.accelerator.device),
                max_new_tokens=arguments.max_completion_length,
                profile=self.profile,
                temperature=arguments.temperature,
                stop_id=trainer.processing_class.eos_token_id,
                generator=self._generator,
            )
            ours = log_probs(policy, rollout.tokens, temperature=arguments.temperature).cpu()
            texts = zip(rollout.tokens.cpu(), rollout.log_probs, ours, rollout.mask, strict=True)
            drawn += [(ids[1:][mask], theirs[mask], own[mask]) for ids, theirs, own, mask in texts]
        tokens, server, own = map(list, zip(*drawn, strict=True))
        mask = pad_sequence([torch.ones_like(each, dtype=torch.bool) for each in tokens], batch_first=True)
        self.monitor.update(pad_sequence(own, batch_first=True), pad_sequence(server, batch_first=True), mask)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [each.tolist() for each in tokens],
            "logprobs": [each.tolist() for each in server],
        }


class MismatchCallback(TrainerCallback):
    """Add a monitor's last mismatch to the trainer's logs, as ``mismatch/k3`` and others.

    Args:
        monitor: of :class:`ProfileRollouts`, or one that a loop of one's own updates.
    """

    def __init__(self, monitor: MismatchMonitor) -> None:
        self.monitor = monitor

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the numbers to the logs and their history."""
        if "loss" in (kwargs.get("logs") or {}) and state.log_history and self.monitor.history:
            numbers = self.monitor.history[-1].as_metrics()
            kwargs["logs"] |= numbers
            state.log_history[-1] |= numbers


def _ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a text, or of messages by the tokenizer's chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    ids: list[int] = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    return ids
