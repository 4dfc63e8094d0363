"""Configurations of a decoder so small that a test can build, train and serve it in milliseconds."""

from typing import Any

import torch

from octavo.models import LlamaConfig


def tiny_llama_config(**changes: Any) -> LlamaConfig:
    """Two layers with grouped-query attention; a test names the sizes that its property depends on."""
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
    attention = {"num_heads": 4, "num_kv_heads": 2, "max_positions": 64}
    return LlamaConfig(**{**shape, **attention, **changes})


def tiny_hugging_face_config(**changes: Any) -> Any:
    """The same decoder as a ``transformers.LlamaConfig``, for tests that have made sure of transformers."""
    import transformers

    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return transformers.LlamaConfig(**{**shape, **attention, **changes})


class TinyTexts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """32 texts of eight tokens below 32, as transformers' Trainer reads them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * (index % 5 + 1) + index) % 32
        return {"input_ids": ids, "labels": ids}
