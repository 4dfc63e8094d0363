"""Held-out text of a trained run, encoded in memory with the run's tokenizer.

Held-out text is the test split of the run's own text, or all of another text. Losses per token of runs with different
tokenizers are not comparable.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from octavo.text.corpus import Document, Split, content_hash
from octavo.text.sources import ALL, BUILTIN, check_split, divide, load_documents, unseen_split
from octavo.text.tokenizer import end_of_text_id
from octavo.text.tokens import TokenData
from octavo.training.run_folder import TrainedRun

__all__ = ["BATCH_WINDOWS", "batches_of", "held_out", "watching_forwards"]

BATCH_WINDOWS = 16


def held_out(
    run: TrainedRun,
    run_dir: Path,
    *,
    source: str | None = None,
    split: str | None = None,
    on_document: Callable[[int, int], None] = lambda _done, _total: None,
) -> TokenData:
    """Encode the text to evaluate on, as the test split of a ``TokenData``.

    Args:
        run: the run, with its tokenizer.
        run_dir: the run's folder.
        source: see ``octavo.text.sources``; None is the run's own text.
        split: "train", "validation", "test" or "all"; None is text that the run has not been trained on, see
            ``octavo.text.sources.unseen_split``.
        on_document: called with (done, total) documents.

    Raises:
        ConfigError: an unknown split.
        DataError: the source holds no text.
    """
    run_source = run.config.data.source
    source = source or run_source
    split = split or unseen_split(source, run_source)
    check_split(split)
    documents = load_documents(source)
    selected = documents if split == ALL else divide(documents, by_file=source == BUILTIN)[Split(split)]
    tokens = _encode(run, selected, on_document)
    manifest = {"source": source, "content_hash": content_hash(documents), "split": split}
    size = run.tokenizer.get_vocab_size()
    return TokenData(folder=run_dir, manifest=manifest, vocab_size=size, splits={Split.TEST: tokens})


def batches_of(data: TokenData, context: int, *, max_tokens: int | None = None) -> int:
    """Number of forward passes of ``BATCH_WINDOWS`` windows in an evaluation of the test split."""
    inputs, _ = data.windows(context, split=Split.TEST, max_tokens=max_tokens)
    return math.ceil(len(inputs) / BATCH_WINDOWS)


@contextmanager
def watching_forwards(model: nn.Module, on_forward: Callable[[int], None]) -> Iterator[None]:
    """Call ``on_forward`` with the number of forward passes so far, after each one inside the block."""
    count = 0

    def hook(*_: object) -> None:
        nonlocal count
        count += 1
        on_forward(count)

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _encode(run: TrainedRun, documents: list[Document], on_document: Callable[[int, int], None]) -> NDArray[Any]:
    end = end_of_text_id(run.tokenizer)
    ids: list[int] = []
    for done, document in enumerate(documents, start=1):
        ids += [*run.tokenizer.encode(document.text, add_special_tokens=False).ids, end]
        on_document(done, len(documents))
    return np.array(ids, dtype=np.uint32)
