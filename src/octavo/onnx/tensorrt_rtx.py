"""Build a graph with TensorRT-RTX's parser and builder on a CPU, and count how much of the engine stays FP8.

NVIDIA's Python bindings parse and build without a GPU and its driver; the engine is inspected, not run. A crash in a
C++ library ends the process, so the check runs in a separate process, which does not import octavo::

    python -I tensorrt_rtx.py MODEL < ranges.json

An engine contains a listing of its tensors and steps as text. The listing's form depends on the version, so the check
is skipped for any other version.
"""

import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the separate process does not import octavo
    from octavo.onnx.tensorrt import ShapeRange

__all__ = ["BuildCheck", "check_build", "why_skipped"]

VERSION = "1.7.1"
PACKAGES = ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs")
INSTALL = "pip install 'octavo[tensorrt-rtx]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCheck:
    """Result of building a TensorRT-RTX engine from a graph.

    Attributes:
        engine: name and version of the builder.
        skipped: reason why no build was tried; empty if one was.
        problem: first error message; empty if an engine was built.
        engine_bytes: size of the engine.
        fp8_products: number of matrix products of two FP8 tensors, as in the graph: merged q, k and v count as three.
        fp8_bytes: bytes of FP8 constants, including those that are decoded for a product in high precision.
    """

    engine: str
    skipped: str = ""
    problem: str = ""
    engine_bytes: int = 0
    fp8_products: int = 0
    fp8_bytes: int = 0

    def __str__(self) -> str:
        if self.skipped or self.problem:
            return f"{self.engine}: {f'not run: {self.skipped}' if self.skipped else self.problem}"
        return (
            f"{self.engine}: parsed and built on a CPU, not run; an engine of {self.engine_bytes / 1e6:.1f} MB with "
            f"{self.fp8_products} products in FP8 and {self.fp8_bytes / 1e6:.1f} MB of weights in FP8"
        )


def why_skipped() -> str:
    """Reason why the check cannot run; empty if it can.

    Example:
        >>> "not installed" in why_skipped() or "version" in why_skipped() or why_skipped() == ""
        True
    """
    for package in PACKAGES:
        try:
            installed = version(package)
        except PackageNotFoundError:
            return f"{package} is not installed; {INSTALL}"
        if not f"{installed}.".startswith(f"{VERSION}."):
            return f"this check reads engines of version {VERSION}, and {package} is version {installed}; {INSTALL}"
    return ""


def check_build(path: Path, ranges: "tuple[ShapeRange, ...]") -> BuildCheck:
    """Parse a graph and build its engine.

    Args:
        path: file of the graph; its weights may be in a second file beside it.
        ranges: shapes of its inputs.
    """
    skipped, name = why_skipped(), f"TensorRT-RTX {VERSION}"
    if skipped:
        return BuildCheck(engine="TensorRT-RTX", skipped=skipped)
    done = subprocess.run(
        [sys.executable, "-I", __file__, str(path)],
        input=json.dumps([asdict(each) for each in ranges]),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        cause = f"exit code {done.returncode}" if done.returncode > 0 else Signals(-done.returncode).name
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return BuildCheck(engine=name, problem=f"its process ended by {cause}: {message}")
    return BuildCheck(engine=name, **json.loads(done.stdout))


class _RefusedError(Exception):
    """TensorRT rejected the graph; the message is TensorRT's."""


def _build(model: str, ranges: list[dict[str, Any]]) -> bytes:
    """Serialized engine of a graph; raises _RefusedError."""
    import tensorrt_rtx_bindings as tensorrt

    class Errors(tensorrt.ILogger):  # type: ignore[misc]  # the bindings have no annotations
        def log(self, severity: Any, message: str) -> None:
            if severity in (self.Severity.ERROR, self.Severity.INTERNAL_ERROR):
                messages.append(message)

    messages: list[str] = []
    logger = Errors()
    builder = tensorrt.Builder(logger)
    network = builder.create_network()
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(model):
        raise _RefusedError(_first_error(parser))
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for each in ranges:
        profile.set_shape(each["name"], each["min"], each["opt"], each["max"])
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise _RefusedError(messages[0] if messages else "it built no engine and reported no error")
    return bytes(engine)


def _first_error(parser: Any) -> str:
    error = parser.get_error(0)
    return f"{f'node {error.node_name()!r}: ' if error.node_name() else ''}{error.desc()}"


def _fp8_in(engine: bytes) -> dict[str, int]:
    """Count FP8 products and bytes in the engine's listing of tensors and steps."""
    fp8 = set(re.findall(rb'tensor=\{[^\n]* name="([^"]+)"[^\n]* type=fp8_e4m3 \}', engine))
    constants = re.findall(rb"tensor=\{[^\n]* const_payload_size=(\d+) [^\n]* type=fp8_e4m3 \}", engine)
    products = re.findall(rb'fully_connected=\{ name="([^"]*)" output=\{[^}]*\} input=\{"([^"]*)" "([^"]*)"', engine)
    return {
        "fp8_products": sum(name.count(b"+") + 1 for name, left, right in products if {left, right} <= fp8),
        "fp8_bytes": sum(map(int, constants)),
    }


def main(arguments: list[str]) -> int:
    """Run the command; prints the remaining fields of a :class:`BuildCheck` as JSON."""
    (model,) = arguments
    try:
        engine = _build(model, json.load(sys.stdin))
    except _RefusedError as refused:
        sys.stdout.write(json.dumps({"problem": " ".join(str(refused).split())}))
        return 0
    sys.stdout.write(json.dumps({"engine_bytes": len(engine), **_fp8_in(engine)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
