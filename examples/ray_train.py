"""``octavo train`` under Ray Train: ``python examples/ray_train.py CONFIG.toml RUN RANKS [--resume]``."""

import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from octavo.text.tokens import open_data, prepare
from octavo.training.config import load_config
from octavo.training.loop import train
from octavo.training.run_folder import check_start

config, run = load_config(Path(sys.argv[1])), Path(sys.argv[2]).absolute()  # RUN: a folder that all machines see
check_start(run, config, resume="--resume" in sys.argv)  # refuses a run that an earlier launch has begun
prepare(config.data.source, run / "data", vocab_size=config.data.vocab_size)
TorchTrainer(
    # A run in the folder is one that this launch began, or may resume.
    lambda: train(config, run, data=open_data(run / "data"), resume=(run / "config.toml").exists()),
    torch_config=TorchConfig(backend="gloo"),  # on GPUs nccl, and ScalingConfig(use_gpu=True)
    scaling_config=ScalingConfig(num_workers=int(sys.argv[3])),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),  # from the last whole checkpoint
).fit()
