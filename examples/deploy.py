"""A calibrated language model as an ONNX graph in FP8, with what TensorRT needs to build an engine of it.

    python examples/deploy.py MODEL CALIBRATION FOLDER [--dtype fp16] [--kv-cache]

MODEL is a run's folder, a Hugging Face folder or a .gguf file; CALIBRATION is what ``octavo calibrate`` wrote for it.
docs/deploy.md walks from there to an engine.
"""

import argparse

import octavo
from octavo.export.onnx import OnnxOptions, export_onnx
from octavo.language_model import load_language_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--kv-cache", action="store_true")
    arguments = parser.parse_args()
    model = load_language_model(arguments.model)
    calibration = octavo.load_calibration(arguments.calibration)
    calibration.apply(model, hold_weights=True)
    options = OnnxOptions(dtype=arguments.dtype, kv_cache=arguments.kv_cache, tensorrt=True)
    report = export_onnx(model, arguments.folder, options=options, calibration=calibration, on_step=print)
    print(report)


if __name__ == "__main__":
    main()
