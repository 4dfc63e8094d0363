"""Picture of the KL of every pair of profiles, those of one family together."""

from html import escape

import numpy as np
from numpy.typing import NDArray

from octavo.engines import PROFILES
from octavo.numerics import PerBlock, PerRow, PerTensor
from octavo.numerics.engine_cast import PowerOfTwo
from octavo.recipes.engines.profile import EngineProfile

__all__ = ["FAMILIES", "family_of", "heat_map"]

SIDE, LEFT, TOP = 28, 190, 170  # of a cell, and of what is beside and above it
FAMILIES = ("BF16", "a float scale a tensor", "scales of powers of two", "float scales a row", "float scales of 128")
DARK = np.array([194, 65, 12])  # of the largest KL; 0 is white


def heat_map(names: tuple[str, ...], kl: NDArray[np.float64]) -> str:
    """SVG of KL(row ‖ column) in thousandths of a nat.

    Args:
        names: profiles, or others, which come first.
        kl: [names, names], nats a token.
    """
    families = {name: family_of(PROFILES.get(name)) for name in names}
    order = sorted(range(len(names)), key=lambda index: FAMILIES.index(families[names[index]]))
    width, height = LEFT + SIDE * len(names) + 10, TOP + SIDE * len(names) + 30
    box = f'viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, index in enumerate(order):
        near = SIDE * place + SIDE / 2
        name = escape(names[index])
        lines.append(f'<text x="{LEFT - 6}" y="{TOP + near + 4}" text-anchor="end">{name}</text>')
        lines.append(f'<text transform="translate({LEFT + near + 4} {TOP - 6}) rotate(-90)">{name}</text>')
        for column, other in enumerate(order):
            lines += _cell(LEFT + SIDE * column, TOP + SIDE * place, float(kl[index, other]), float(kl.max()))
    for family in FAMILIES[1:]:
        places = [place for place, index in enumerate(order) if families[names[index]] == family]
        if places:
            first, side = SIDE * places[0], SIDE * len(places)
            lines.append(
                f'<rect x="{LEFT + first}" y="{TOP + first}" width="{side}" height="{side}" fill="none" '
                f'stroke="black" stroke-width="2"><title>{family}</title></rect>'
            )
    lines.append(f'<text x="{LEFT}" y="{height - 10}">KL(row ‖ column), thousandths of a nat; frames: families</text>')
    return "\n".join([*lines, "</svg>", ""])


def family_of(profile: EngineProfile | None) -> str:
    """The family of :data:`FAMILIES` that a profile is of; None is BF16."""
    if profile is None:
        return FAMILIES[0]
    if profile.weight.power_of_two != PowerOfTwo.NONE:
        return FAMILIES[2]
    kinds = {PerTensor: FAMILIES[1], PerRow: FAMILIES[3], PerBlock: FAMILIES[4]}
    return kinds[type(profile.weight.granularity)]


def _cell(x: int, y: int, nats: float, largest: float) -> list[str]:
    share = nats / largest if largest else 0.0
    colour = "#" + bytes(np.rint(255 + share * (DARK - 255)).astype(np.uint8).tolist()).hex()
    lines = [f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="{colour}"/>']
    shade = "white" if share > 0.6 else "black"
    text = f"{1000 * nats:.0f}" if nats else "0"
    return [*lines, f'<text x="{x + SIDE / 2}" y="{y + 18}" fill="{shade}" text-anchor="middle">{text}</text>']
