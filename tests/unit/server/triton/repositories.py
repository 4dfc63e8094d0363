"""A repository of a model small enough for seconds."""

import octavo
from octavo import recipes
from octavo.export.sources import ExportSource
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.onnx import OnnxOptions
from octavo.server.triton.repository import write_repository
from tests.unit.server.triton.conftest import SHAPE


def source(tokenizer, recipe):
    """A model that runs the recipe."""
    model = LanguageModel(model=Llama(SHAPE, seed=3), tokenizer=tokenizer, context=SHAPE.max_positions, source="made")
    model.model.requires_grad_(False)
    octavo.convert(model.model, recipe)
    return ExportSource(language_model=model)


def written_repository(folder, tokenizer, *, dtype="fp32"):
    """As ``octavo export`` writes it, but for the checkpoint's reading back."""
    return write_repository(
        folder,
        engine=lambda: source(tokenizer, recipes.get("rowwise", power_of_two=False)),  # as load_source has it
        graph=lambda: (source(tokenizer, "tensorwise"), OnnxOptions(dtype=dtype, tensorrt=True)),
        max_shard_bytes=10**9,
        verify=False,
    )
