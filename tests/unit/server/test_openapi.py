"""The file describes what the server does: schemathesis asks by it, whatever comes to its mind, and finds no 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.server import create_app

EXAMPLES = 4  # of each operation
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.mark.long
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_causes_a_server_error(service, mode):
    statuses: list[int] = []
    app = create_app(service, host="0.0.0.0")  # schemathesis asks for the host "testserver"
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    know_the_names(schema.raw_schema)
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # nothing of it can be wrong but its path

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
        )
        def ask(case):
            statuses.append(case.call_and_validate(checks=CHECKS).status_code)

        ask()
    assert len(statuses) > 20
    assert 200 in statuses or mode is GenerationMode.NEGATIVE


def know_the_names(file):
    """Requests are for the model that is served, most of all; another's are refused without another look."""
    for path in file["paths"].values():
        for operation in path.values():
            for parameter in operation["parameters"]:
                parameter["schema"]["enum"] = [{"model": "tiny", "version": "1"}[parameter["name"]]]
            for content in operation.get("requestBody", {"content": {}})["content"].values():
                if "model" in content["schema"]["properties"]:
                    content["schema"]["properties"]["model"] = {"const": "tiny"}


def test_every_operation_is_described_with_its_fields(client):
    file = client.get("/openapi.json").json()
    body = file["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert sorted(body["required"]) == ["model", "prompt"]
    assert body["additionalProperties"] is False
    assert body["properties"]["max_tokens"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 300}
    assert "403" in file["paths"]["/v1/completions"]["post"]["responses"]
    assert len(file["paths"]) == len(set(file["paths"])) > 15
    assert file["paths"]["/v2/models/{model}/infer"]["post"]["responses"]["400"]["content"] == {
        "application/json": {"schema": {"$ref": "#/components/schemas/KServeError"}}
    }
