"""Reinforcement learning of a small policy with FP8 rollouts, with and without a mismatch of trainer and rollouts.

    python examples/rl_fp8_rollouts.py [--seeds 5] [--updates 80] [--server vllm-block-ue8m0]
        [--trainers fp32,vllm-block,vllm-block-ue8m0] [--out runs/rl.html]

A Llama of 70,000 parameters learns to count: each drawn token earns 1 if it is the successor, modulo the vocabulary, of
the token before it. Completions are drawn as the server's engine draws them, in FP8. The trainer's loss is that of
REINFORCE with the group's mean as baseline, −A · log p, with log p of the policy in FP32, or as an engine computes it
(octavo.engines.convert_as_served): as vllm-block with float scales where the server has powers of two, or as the server
itself, whose log-probabilities it then has bit for bit.

All start from the same weights and read the same prompts and random numbers. Printed: the reward of the last tenth of
the updates, the reward and k3, which estimates KL(server ‖ trainer), of all of them, with 95 % intervals over seeds.
"""

import argparse
import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from octavo import engines
from octavo.experiments.intervals import student_interval
from octavo.models import Llama, LlamaConfig
from octavo.rl import MismatchMonitor, sample_rollout

VOCABULARY, PROMPT, DRAWN = 32, 2, 8
PROMPTS, GROUP = 8, 8
FP32 = "fp32"
COLORS = ("#c2410c", "#a16207", "#1d4ed8", "#15803d")


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


def train_policy(seed: int, server: str, trainer: str, *, updates: int, lr: float = 6e-3) -> Curves:
    """Train one policy.

    Args:
        seed: of weights, prompts and draws.
        server: profile that draws.
        trainer: profile whose forward pass is trained, or "fp32".
        updates: optimizer steps.
        lr: of AdamW.
    """
    policy, generator = new_policy(seed), torch.Generator().manual_seed(seed)
    monitor, rewards = MismatchMonitor(), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    as_trainer = None if trainer == FP32 else engines.convert_as_served(policy, engines.get(trainer))
    for _ in range(updates):
        prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=generator).repeat_interleave(GROUP, dim=0)
        drawn = sample_rollout(policy, prompts, profile=server, max_new_tokens=DRAWN, generator=generator)
        with ExitStack() as context:
            if as_trainer is not None:
                context.enter_context(as_trainer)
                context.enter_context(engines.RowByRow())  # as the server: a row's bits do not depend on the others
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
    return fmean(curve[-max(1, len(curve) // 10) :])


def rows(curves: dict[str, list[Curves]], server: str) -> list[list[str]]:
    """Rows of the table: rewards and k3 of each trainer, and the server's rewards above each other's, paired."""
    last = {name: [final(each.reward) for each in lines] for name, lines in curves.items()}
    overall = {name: [fmean(each.reward) for each in lines] for name, lines in curves.items()}
    k3 = {name: [fmean(each.k3) for each in lines] for name, lines in curves.items()}
    table = [[name, _shown(last[name]), _shown(overall[name]), _shown(k3[name], 3)] for name in curves]
    for name in curves:
        if server in curves and name != server:
            pairs = (zip(rewards[name], rewards[server], strict=True) for rewards in (last, overall))
            table.append([f"{server} − {name}", *(_shown([b - a for a, b in pair]) for pair in pairs), ""])
    return table


def _shown(seeds: list[float], digits: int = 4) -> str:
    interval = student_interval(seeds)
    error = "" if math.isnan(interval.error) else f" ± {interval.half_width:.2g}"
    return f"{interval.estimate:.{digits}g}{error}"


def figure(curves: dict[str, list[Curves]]) -> go.Figure:
    """Reward and k3 by update: a thin line a seed, a thick one for their mean; a k3 of 0 has no place on its axis."""
    drawing = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.06)
    for (name, runs), color in zip(curves.items(), COLORS, strict=False):
        for row, what in enumerate(("reward", "k3"), start=1):
            lines = [getattr(each, what) for each in runs]
            for line in lines:
                drawing.add_scatter(
                    y=line, line={"color": color, "width": 0.7}, opacity=0.4, showlegend=False, row=row, col=1
                )
            mean = [fmean(values) for values in zip(*lines, strict=True)]
            thick = {"color": color, "width": 3}
            drawing.add_scatter(y=mean, line=thick, name=name, showlegend=row == 1, row=row, col=1)
    drawing.update_yaxes(title_text="mean reward of a token", row=1, col=1)
    drawing.update_yaxes(title_text="k3, nats a token", type="log", exponentformat="power", row=2, col=1)
    drawing.update_xaxes(title_text="update", row=2, col=1)
    drawing.update_layout(title="A policy with FP8 rollouts, by the trainer's forward pass", height=700)
    return drawing


def main() -> None:
    """Train with each forward pass from each seed, print the table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--server", default="vllm-block-ue8m0", help="Profile that draws; see octavo.engines.names().")
    parser.add_argument("--trainers", default="fp32,vllm-block,vllm-block-ue8m0", help="fp32 or profiles to train as.")
    parser.add_argument("--out", type=Path, help="HTML page of the curves.")
    arguments = parser.parse_args()
    curves: dict[str, list[Curves]] = {name: [] for name in arguments.trainers.split(",")}
    for seed in range(arguments.seeds):
        for name, lines in curves.items():
            lines.append(train_policy(seed, arguments.server, name, updates=arguments.updates))
            print(f"seed {seed}, {name}: reward {final(lines[-1].reward):.3f}", flush=True)
    print(f"\n{'trainer':32}{'reward at the end':20}{'in all updates':20}{'k3, nats a token':20}")
    for name, *cells in rows(curves, arguments.server):
        print(f"{name:32}{''.join(f'{cell:20}' for cell in cells)}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        figure(curves).write_html(arguments.out)
        print(f"curves: {arguments.out}")


if __name__ == "__main__":
    main()
