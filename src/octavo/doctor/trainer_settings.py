"""Settings of a Hugging Face training that a run and its reference must share: trainer_settings.json.

:class:`octavo.doctor.huggingface.DoctorCallback` writes the file beside metrics.jsonl, so that ``octavo doctor RUN
--against REFERENCE`` refuses a reference with another seed, schedule or batch.
"""

import json
from pathlib import Path
from typing import Any

from octavo.errors import DataError
from octavo.files import write_atomically
from octavo.parsing import read_object

__all__ = ["read_trainer_settings", "write_trainer_settings"]

FILE = "trainer_settings.json"
SETTINGS = (  # of transformers.TrainingArguments
    "seed",
    "data_seed",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "weight_decay",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "label_smoothing_factor",
    "bf16",
    "fp16",
)


def write_trainer_settings(folder: Path, arguments: object) -> None:
    """Write the settings of ``transformers.TrainingArguments``; those that its version lacks are left out.

    Raises:
        OSError: the file cannot be written.
    """
    settings = {name: getattr(arguments, name) for name in SETTINGS if hasattr(arguments, name)}
    write_atomically(folder / FILE, json.dumps(settings, indent=2, default=str) + "\n")


def read_trainer_settings(folder: Path) -> dict[str, Any]:
    """Read what :func:`write_trainer_settings` wrote; empty where nothing was written.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except DataError as error:
        raise DataError(f"{error}; delete it: the settings of two runs are then not compared") from error
