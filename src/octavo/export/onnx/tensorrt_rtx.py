"""TensorRT-RTX's own parser and builder, asked whether they take a graph, and how much of it stays FP8.

The wheel ``onnxruntime-ep-nv-tensorrt-rtx-cu13`` 0.5.0 holds TensorRT-RTX 1.7.1 and its ONNX parser. Both work without
a GPU and without its driver; what they build is looked at, not run. (The wheel's own way, a plugin for onnxruntime,
loads the driver's libraries first.)

There are neither Python bindings nor headers in the wheel. What is called are virtual functions of C++ objects, by
their places in the tables that the Itanium ABI begins every object with. Places are facts of one version, so another
version is named and left alone. A wrong call ends its process, so the check is a process of its own, which imports
nothing but Python's library::

    python -I tensorrt_rtx.py FOLDER MODEL < ranges.json

Source: the order of functions in TensorRT's public headers (NvInferImpl.h, NvOnnxParser.h, NvInferRuntimeBase.h) less
those that were deprecated, compared with the names that the wheel's libtensorrt_shim.so gives them.
"""

import ctypes
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the process of its own has no octavo
    from octavo.export.onnx.tensorrt import ShapeRange

__all__ = ["BuildCheck", "check_build", "why_skipped"]

VERSION, PACKAGE = "1.7.1", "onnxruntime_ep_nv_tensorrt_rtx"
RUNTIME, PARSER = "libtensorrt_rtx.so", "libtensorrt_onnxparser_rtx.so"
INSTALL = "pip install 'octavo[tensorrt-rtx]'"

CREATE_CONFIG, CREATE_NETWORK, CREATE_PROFILE, BUILD = 5, 6, 7, 11  # of IBuilder
ADD_PROFILE = 23  # of IBuilderConfig
SET_DIMENSIONS = 2  # of IOptimizationProfile
DATA, SIZE = 2, 3  # of IHostMemory
PARSE_FILE, GET_ERROR = 1, 4  # of IParser
DESCRIPTION, NODE_NAME = 1, 6  # of IParserError
LOG = 4  # of ILogger
ERROR = 1  # ILogger's severities: 0 internal error, 1 error, 2 warning, …
MOST_DIMENSIONS = 8

Address = ctypes.c_void_p


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCheck:
    """What TensorRT-RTX made of a graph.

    Attributes:
        engine: its name and version.
        skipped: why it was not asked; empty where it was.
        problem: the first thing it refuses, in its words; empty where it built an engine.
        engine_bytes: of that engine.
        fp8_products: its matrix products of two tensors in FP8, counted as in the graph: q, k and v at once are three.
        fp8_bytes: of its constants in FP8, those too that are decoded for a product in high precision.
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
    """Why there is nobody to ask; empty where there is.

    Example:
        >>> "not installed" in why_skipped() or "version" in why_skipped() or why_skipped() == ""
        True
    """
    folder = _folder()
    if folder is None:
        return f"{PACKAGE.replace('_', '-')}-cu13 is not installed; {INSTALL}"
    if not (folder / f"{RUNTIME}.{VERSION}").is_file():
        found = ", ".join(sorted(each.name for each in folder.glob(f"{RUNTIME}.*.*"))) or f"no {RUNTIME}"
        return f"this check calls version {VERSION}, and {PACKAGE} holds {found}"
    return ""


def check_build(path: Path, ranges: "tuple[ShapeRange, ...]") -> BuildCheck:
    """Parse a graph and build its engine.

    Args:
        path: of the graph; its weights may lie beside it.
        ranges: the shapes of its inputs.
    """
    skipped, name = why_skipped(), f"TensorRT-RTX {VERSION}"
    if skipped:
        return BuildCheck(engine="TensorRT-RTX", skipped=skipped)
    done = subprocess.run(
        [sys.executable, "-I", __file__, str(_folder()), str(path)],
        input=json.dumps([asdict(each) for each in ranges]),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        ended = f"exit code {done.returncode}" if done.returncode > 0 else Signals(-done.returncode).name
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return BuildCheck(engine=name, problem=f"its process ended by {ended}: {said}")
    return BuildCheck(engine=name, **json.loads(done.stdout))


def _folder() -> Path | None:
    """Of the package, which is not imported: that would put links beside its libraries."""
    found = find_spec(PACKAGE)
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


class _RefusedError(Exception):
    """TensorRT's words."""


class _Dims(ctypes.Structure):
    """A shape."""

    _fields_ = (("count", ctypes.c_int32), ("sizes", ctypes.c_int64 * MOST_DIMENSIONS))


class _Logger:
    """An ILogger that keeps what is an error."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._log = ctypes.CFUNCTYPE(None, Address, ctypes.c_int, ctypes.c_char_p)(self._note)
        self._table = (Address * (LOG + 1))()
        self._table[LOG] = ctypes.cast(self._log, Address).value
        self._object = Address(ctypes.addressof(self._table))
        self.address = ctypes.addressof(self._object)

    def _note(self, _: int, severity: int, message: bytes) -> None:
        if severity <= ERROR:
            self.errors.append(message.decode(errors="replace"))

    def made(self, address: int | None) -> int:
        """What was made; raises _RefusedError, with the first error, where that is nothing."""
        if not address:
            raise _RefusedError(self.errors[0] if self.errors else "it made nothing, and did not say why")
        return address


def _call(address: int, place: int, result: Any, *arguments: Any) -> Any:
    """The virtual function at a place of an object's table."""
    table = Address.from_address(address).value or 0
    function = Address.from_address(table + place * ctypes.sizeof(Address)).value or 0
    return ctypes.CFUNCTYPE(result, Address, *map(type, arguments))(function)(address, *arguments)


def _inner(address: int) -> int:
    """TensorRT's objects, but for the parser's, hand every call on to one that they hold behind their table."""
    return Address.from_address(address + ctypes.sizeof(Address)).value or 0


def _make(library: ctypes.CDLL, name: str, *arguments: Any) -> int | None:
    """By one of the functions that have a name."""
    function = library[name]
    function.restype = Address
    made: int | None = function(*arguments)
    return made


def _build(folder: Path, model: str, ranges: list[dict[str, Any]]) -> bytes:
    """The engine; raises _RefusedError."""
    runtime = ctypes.CDLL(str(folder / f"{RUNTIME}.{VERSION}"), mode=ctypes.RTLD_GLOBAL)
    parsers = ctypes.CDLL(str(folder / f"{PARSER}.{VERSION}"))
    logger = _Logger()
    log = Address(logger.address)
    builder = _inner(logger.made(_make(runtime, "createInferBuilder_INTERNAL", log, runtime.getInferLibVersion())))
    network = Address(logger.made(_call(builder, CREATE_NETWORK, Address, ctypes.c_uint32(0))))
    parser = logger.made(
        _make(parsers, "createNvOnnxParser_INTERNAL", network, log, parsers.getNvOnnxParserVersion(), None)
    )
    if not _call(parser, PARSE_FILE, ctypes.c_bool, ctypes.c_char_p(model.encode()), ctypes.c_int(ERROR)):
        raise _RefusedError(_first_error(parser))
    config = logger.made(_call(builder, CREATE_CONFIG, Address))
    profile = logger.made(_call(builder, CREATE_PROFILE, Address))
    for each in ranges:
        for point, sizes in enumerate((each["min"], each["opt"], each["max"])):
            shape = ctypes.pointer(_Dims(len(sizes), (ctypes.c_int64 * MOST_DIMENSIONS)(*sizes)))
            name, selector = ctypes.c_char_p(each["name"].encode()), ctypes.c_int(point)
            if not _call(_inner(profile), SET_DIMENSIONS, ctypes.c_bool, name, selector, shape):
                raise _RefusedError(f"input {each['name']!r} cannot have the shape {sizes}")
    _call(_inner(config), ADD_PROFILE, ctypes.c_int, Address(profile))
    memory = _inner(logger.made(_call(builder, BUILD, Address, network, Address(config))))
    return ctypes.string_at(_call(memory, DATA, Address), _call(memory, SIZE, ctypes.c_size_t))


def _first_error(parser: int) -> str:
    error = _call(parser, GET_ERROR, Address, ctypes.c_int(0))
    description, node = (_call(error, place, ctypes.c_char_p) or b"" for place in (DESCRIPTION, NODE_NAME))
    return f"{f'node {node.decode()!r}: ' if node else ''}{description.decode()}"


def _fp8_in(engine: bytes) -> dict[str, int]:
    """Counted in the listing of tensors and steps that an engine holds as text."""
    fp8 = set(re.findall(rb'tensor=\{[^\n]* name="([^"]+)"[^\n]* type=fp8_e4m3 \}', engine))
    constants = re.findall(rb"tensor=\{[^\n]* const_payload_size=(\d+) [^\n]* type=fp8_e4m3 \}", engine)
    products = re.findall(rb'fully_connected=\{ name="([^"]*)" output=\{[^}]*\} input=\{"([^"]*)" "([^"]*)"', engine)
    return {
        "fp8_products": sum(name.count(b"+") + 1 for name, left, right in products if {left, right} <= fp8),
        "fp8_bytes": sum(map(int, constants)),
    }


def main(arguments: list[str]) -> int:
    """The command; prints the rest of a :class:`BuildCheck` as JSON."""
    folder, model = arguments
    try:
        engine = _build(Path(folder), model, json.load(sys.stdin))
    except _RefusedError as refused:
        sys.stdout.write(json.dumps({"problem": " ".join(str(refused).split())}))
        return 0
    sys.stdout.write(json.dumps({"engine_bytes": len(engine), **_fp8_in(engine)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
