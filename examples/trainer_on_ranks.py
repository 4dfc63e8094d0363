"""FP8 in Hugging Face's Trainer on several ranks, by DDP or FSDP2.

torchrun --nproc-per-node 2 examples/trainer_on_ranks.py FOLDER [fsdp2]
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from octavo.compat.huggingface import FP8Callback

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHARDED = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def train(folder: str, *, fsdp2: bool = False, resume: str | None = None, **settings: object) -> Trainer:
    """Train a tiny Llama; the callback converts it before the Trainer wraps it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES))
    texts = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(32, (32, 8))]
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),  # without it, accelerate lets ranks without a GPU train alone
        **(SHARDED if fsdp2 else {}),
        **settings,
    )
    fp8 = FP8Callback("delayed", skip=["lm_head"])
    trainer = Trainer(model=model, args=arguments, train_dataset=texts, callbacks=[fp8])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], fsdp2="fsdp2" in sys.argv[2:])
