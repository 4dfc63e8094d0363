"""A checkpoint of one process as two ranks would have written it."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.checksums import sealed, unsealed
from octavo.training.checkpoint_files import fingerprint


def divided(path: Path) -> None:
    """Divide matrices by rows and share the other tensors out, with the metadata of torch.distributed.checkpoint."""
    raw = unsealed(json.loads((path / "state.json").read_text()))
    for kind in ("model", "optimizer", "scaling"):
        file = path / f"{kind}.safetensors"
        parts: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        starts: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
        for index, (name, tensor) in enumerate(load_file(file).items()):
            rows = len(tensor) // 2 if tensor.ndim > 1 else 0
            for rank, piece in enumerate([tensor[:rows], tensor[rows:]]) if rows else [(index % 2, tensor)]:
                parts[rank][name] = piece.contiguous()
                starts[rank][name] = [rank * rows, *[0] * (tensor.ndim - 1)][: tensor.ndim]
        file.unlink()
        del raw["files"][file.name]
        for rank in (0, 1):
            part = path / f"{kind}-0000{rank + 1}-of-00002.safetensors"
            places = {name: {"saved_offsets": start} for name, start in starts[rank].items()}
            save_file(parts[rank], part, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
            raw["files"][part.name] = fingerprint(part)
    (path / "state.json").write_text(json.dumps(sealed(raw)))
