"""Asks a server with NVIDIA's clients, and reads config.pbtxt with the protocol's own message; no octavo in it.

stdin is an object of what to ask, by the names of the functions below; stdout has the answers by the same names.
"""

import json
import queue
import sys
from typing import Any

import numpy as np

DTYPES = {
    "text_input": np.object_,
    "stop": np.object_,
    "max_tokens": np.int32,
    "top_k": np.int32,
    "seed": np.int64,
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
    "ignore_eos": np.bool_,
    "input_ids": np.int64,
}


def inputs_of(module, values):
    from tritonclient.utils import np_to_triton_dtype

    made = []
    for name, value in values.items():
        own = [v.encode() if isinstance(v, str) else v for v in value]
        array: Any = np.array(own, dtype=DTYPES[name])
        made.append(module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array)
    return made


def http(asked):
    """Texts by tritonclient.http's infer, for each request."""
    import tritonclient.http as module

    return whole(module, asked)


def grpc(asked):
    """The same by tritonclient.grpc."""
    import tritonclient.grpc as module

    return whole(module, asked)


def whole(module, asked):
    client = module.InferenceServerClient(asked["place"])
    assert client.is_server_ready()
    assert client.is_model_ready(asked["model"])
    assert client.get_model_metadata(asked["model"])
    return [said(module, client, asked["model"], values) for values in asked["requests"]]


def said(module, client, model, values):
    from tritonclient.utils import InferenceServerException

    try:
        found = client.infer(model, inputs_of(module, values))
    except InferenceServerException as error:
        return {"error": error.message()}
    return [text.decode() for text in found.as_numpy("text_output")]


def stream(asked):
    """Pieces by gRPC's stream, for requests that are all under way at once."""
    import tritonclient.grpc as module

    events: queue.Queue[Any] = queue.Queue()
    client = module.InferenceServerClient(asked["place"])
    client.start_stream(lambda result, error: events.put((result, error)))
    for index, values in enumerate(asked["requests"]):
        inputs = inputs_of(module, values)
        client.async_stream_infer(asked["model"], inputs, request_id=str(index), enable_empty_final_response=True)
    pieces: list[list[str]] = [[] for _ in asked["requests"]]
    left = len(pieces)
    while left:
        result, error = events.get(timeout=120)
        if error is not None:
            raise error
        response = result.get_response()
        own = pieces[int(response.id)]
        if result.as_numpy("text_output") is not None:
            own += [text.decode() for text in result.as_numpy("text_output")]
        left -= response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    return pieces


def abandon(asked):
    """Begin a stream, read a piece of it and go away."""
    import tritonclient.grpc as module

    events: queue.Queue[Any] = queue.Queue()
    client = module.InferenceServerClient(asked["place"])
    client.start_stream(lambda result, error: events.put((result, error)))
    client.async_stream_infer(asked["model"], inputs_of(module, asked["request"]))
    result, error = events.get(timeout=120)
    client.stop_stream(cancel_requests=True)
    return error is None and result.as_numpy("text_output") is not None


def logits(asked):
    """A graph's logits by HTTP: the shape, and the likeliest token at each place."""
    import tritonclient.http as module

    client = module.InferenceServerClient(asked["place"], concurrency=len(asked["requests"]))
    waiting = [client.async_infer("onnx", inputs_of(module, {"input_ids": rows})) for rows in asked["requests"]]
    found = [one.get_result().as_numpy("logits") for one in waiting]
    return [[[*one.shape], one.argmax(-1).tolist()] for one in found]


def configurations(paths):
    """config.pbtxt's as objects, by path; raises where protobuf or a field's name says no."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    read = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 -- this runs alone
            message = text_format.Parse(file.read(), ModelConfig())
        read[path] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return read


ANSWERS = {own.__name__: own for own in (http, grpc, stream, abandon, logits, configurations)}

if __name__ == "__main__":
    json.dump({name: ANSWERS[name](asked) for name, asked in json.load(sys.stdin).items()}, sys.stdout)
