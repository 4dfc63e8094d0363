"""Recipes: which operand of which GEMM is cast how, and where its scale comes from.

A linear layer multiplies three times, always as ``a @ b.T`` with the summed dimension last:

| GEMM          | a                     | b                | result                |
|---------------|-----------------------|------------------|-----------------------|
| `output`      | input [M, K]          | weight [N, K]    | output [M, N]         |
| `grad_input`  | grad_output [M, N]    | weight.T [K, N]  | grad_input [M, K]     |
| `grad_weight` | grad_output.T [N, M]  | input.T [K, M]   | grad_weight [N, K]    |

The presets (sources: the published recipes named in each docstring):

| preset                   | input  | weight           | grad_output | a scale for each                             |
|--------------------------|--------|------------------|-------------|----------------------------------------------|
| `bf16`                   | –      | –                | –           | none: the surrounding precision              |
| `tensorwise`             | E4M3   | E4M3             | E5M2        | tensor, from this tensor                     |
| `delayed`, `delayed_te`, | E4M3   | E4M3             | E5M2        | tensor, from finished steps                  |
| `article`                |        |                  |             |                                              |
| `rowwise`                | E4M3   | E4M3             | E4M3        | row of each GEMM's operand, a power of two   |
| `rowwise_hp_grad_weight` | E4M3   | E4M3             | E4M3        | row; the weight's in grad_input is the       |
|                          |        |                  |             | tensor's; grad_weight in high precision      |
| `blockwise`              | E4M3   | E4M3             | E4M3        | 1x128; weight 128x128; a power of two        |
| `mxfp8`                  | E4M3   | E4M3             | E4M3        | 1x32 of each GEMM's operand, an E8M0 byte    |
| `static`                 | E4M3   | E4M3             | –           | tensor, the input's from calibration; the    |
|                          |        |                  |             | weight's also row or 128x128; the gradients' |
|                          |        |                  |             | GEMMs in high precision                      |
| `weight_only`            | –      | E4M3             | –           | row of the weight; decoded again before the  |
|                          |        |                  |             | GEMM, which is in high precision as are all  |
"""

from octavo.numerics import CastSpec, Scaling
from octavo.recipes.presets import get, names
from octavo.recipes.specs import Close, GemmSpec, History, Recipe, Statistic
from octavo.recipes.toml import from_toml, to_toml

__all__ = [
    "CastSpec",
    "Close",
    "GemmSpec",
    "History",
    "Recipe",
    "Scaling",
    "Statistic",
    "from_toml",
    "get",
    "names",
    "to_toml",
]
