"""``octavo bench``: the group of benchmark commands."""

import typer

from octavo.cli.bench_serve import bench_serve
from octavo.cli.removed_commands import add_moved

__all__ = ["bench"]

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
bench.command(
    name="serve",
    short_help="Serving: latency, throughput and memory, of recipes or of servers.",
    epilog="Example: octavo bench serve model.gguf --recipes bf16,int8,fp8 --batch 1,16",
)(bench_serve)
add_moved(bench, "hopper", "octavo bench hopper", "benchmarks.hopper")
