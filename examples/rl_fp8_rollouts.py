"""Reinforcement learning of a small policy with FP8 rollouts, with and without a mismatch of trainer and rollouts.

    python examples/rl_fp8_rollouts.py [--seeds 5] [--updates 80] [--server vllm-block-ue8m0] [--out runs/rl.html]

A Llama of 70,000 parameters learns to count: each drawn token earns 1 if it is the successor, modulo the vocabulary, of
the token before it. Completions are drawn as the server's engine draws them, in FP8. The trainer's loss is that of
REINFORCE with the group's mean as baseline, −A · log p, with log p

    mismatched   of the policy in FP32
    matched      of the policy as the server computes it (octavo.engines.convert_as_served)

Both start from the same weights and read the same prompts and random numbers. Printed: the reward of the last tenth of
the updates, and the mean over updates of k3, which estimates KL(server ‖ trainer), with 95 % intervals over seeds.
"""

import argparse
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import torch
from torch import Tensor

from octavo import engines
from octavo.experiments.intervals import Interval, student_interval
from octavo.models import Llama, LlamaConfig
from octavo.rl import MismatchMonitor, sample_rollout

VOCABULARY, PROMPT, DRAWN = 32, 2, 8
PROMPTS, GROUP = 8, 8
VARIANTS = ("mismatched", "matched")
COLORS = {"mismatched": "#c2410c", "matched": "#1d4ed8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Mean reward of a token, and k3, by update."""

    reward: tuple[float, ...]
    k3: tuple[float, ...]


def new_policy(seed: int) -> Llama:
    """A policy with random weights."""
    torch.manual_seed(seed)
    return Llama(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
            max_positions=PROMPT + DRAWN,
        )
    )  # fmt: skip


def train_policy(seed: int, server: str, *, matched: bool, updates: int, lr: float = 6e-3) -> Curves:
    """Train one policy.

    Args:
        seed: of weights, prompts and draws.
        server: profile that draws.
        matched: train with the server's forward pass.
        updates: optimizer steps.
        lr: of AdamW.
    """
    policy, generator = new_policy(seed), torch.Generator().manual_seed(seed)
    monitor, rewards = MismatchMonitor(), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    as_server = engines.convert_as_served(policy, engines.get(server)) if matched else nullcontext()
    for _ in range(updates):
        prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=generator).repeat_interleave(GROUP, dim=0)
        with as_server:
            profile = None if matched else server  # a matched policy computes as the server already
            drawn = sample_rollout(policy, prompts, profile=profile, max_new_tokens=DRAWN, generator=generator)
            log_p = token_log_probs(policy, drawn.tokens)
        counted = (drawn.tokens[:, 1:] == (drawn.tokens[:, :-1] + 1) % VOCABULARY).double() * drawn.mask
        reward = counted.sum(1) / DRAWN
        advantage = (reward.view(PROMPTS, GROUP) - reward.view(PROMPTS, GROUP).mean(1, keepdim=True)).flatten()
        optimizer.zero_grad()
        (-(advantage[:, None] * log_p)[drawn.mask].mean()).backward()
        optimizer.step()
        rewards.append(float(reward.mean()))
        monitor.update(log_p, drawn.log_probs, drawn.mask)
    return Curves(reward=tuple(rewards), k3=tuple(found.k3.estimate for found in monitor.history))


def token_log_probs(policy: Llama, tokens: Tensor) -> Tensor:
    """Log-probability of each token after those before it, float64 [B, T - 1], with gradients."""
    logits = policy(tokens[:, :-1]).double()
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]


def final(curve: tuple[float, ...]) -> float:
    """Mean of a curve's last tenth."""
    tail = curve[-max(1, len(curve) // 10) :]
    return sum(tail) / len(tail)


def rows(curves: dict[str, list[Curves]]) -> list[list[str]]:
    """Rows of the table: reward and k3 of each variant, and the paired difference of rewards."""
    rewards = {name: [final(each.reward) for each in curves[name]] for name in VARIANTS}
    k3 = {name: [sum(each.k3) / len(each.k3) for each in curves[name]] for name in VARIANTS}
    table = [
        [name, _shown(student_interval(rewards[name])), _shown(student_interval(k3[name]), 3)] for name in VARIANTS
    ]
    paired = [b - a for a, b in zip(rewards["mismatched"], rewards["matched"], strict=True)]
    return [*table, ["matched − mismatched", _shown(student_interval(paired)), ""]]


def _shown(interval: Interval, digits: int = 4) -> str:
    error = "" if math.isnan(interval.error) else f" ± {interval.half_width:.2g}"
    return f"{interval.estimate:.{digits}g}{error}"


def figure(curves: dict[str, list[Curves]]) -> go.Figure:
    """Rewards by update: a thin line a seed, a thick one for their mean."""
    drawing = go.Figure()
    for name in VARIANTS:
        lines = [each.reward for each in curves[name]]
        for line in lines:
            drawing.add_scatter(y=line, line={"color": COLORS[name], "width": 0.7}, opacity=0.4, showlegend=False)
        mean = [sum(values) / len(values) for values in zip(*lines, strict=True)]
        drawing.add_scatter(y=mean, line={"color": COLORS[name], "width": 3}, name=name)
    drawing.update_layout(
        title="Reward of a policy with FP8 rollouts", xaxis_title="update", yaxis_title="mean reward of a token"
    )
    return drawing


def main() -> None:
    """Train both variants from each seed, print the table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--server", default="vllm-block-ue8m0", help="Profile that draws; see octavo.engines.names().")
    parser.add_argument("--out", type=Path, help="HTML page of the curves.")
    arguments = parser.parse_args()
    curves: dict[str, list[Curves]] = {name: [] for name in VARIANTS}
    for seed in range(arguments.seeds):
        for name in VARIANTS:
            trained = train_policy(seed, arguments.server, matched=name == "matched", updates=arguments.updates)
            curves[name].append(trained)
            print(f"seed {seed}, {name}: reward {final(trained.reward):.3f}", flush=True)
    print(f"\n{'':22}{'reward':20}{'k3, nats a token':20}")
    for name, reward, k3 in rows(curves):
        print(f"{name:22}{reward:20}{k3:20}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        figure(curves).write_html(arguments.out)
        print(f"curves: {arguments.out}")


if __name__ == "__main__":
    main()
