"""``GET /openapi.json``: OpenAPI description of the server, generated from the fields that validate its requests."""

import re
from collections.abc import Iterable
from typing import Any

from octavo.server.operations import JSON, Operation

__all__ = ["openapi"]

REFUSALS = {
    "400": "The request is invalid",
    "401": "The key is missing or wrong",
    "403": "The server has no key, and the request is from another site's web page or to a name that is not local",
    "404": "Unknown model or path",
    "408": "The body arrived too slowly",
    "413": "The body is too large",
    "415": "The body is compressed",
    "429": "Too many requests; Retry-After says when to try again",
    "500": "Internal error of the server",
    "503": "The server is shutting down, or its engine failed",
}
OPENAI = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
KSERVE = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def openapi(operations: Iterable[Operation]) -> dict[str, Any]:
    """OpenAPI document of the operations.

    Example:
        >>> openapi([])["openapi"]
        '3.1.0'
    """
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "octavo", "version": "1", "description": "A language model, served."},
        "paths": paths,
        "components": {
            "schemas": {"OpenAIError": OPENAI, "KServeError": KSERVE},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(each: Operation) -> dict[str, Any]:
    name = "KServeError" if each.path.startswith("/v2") else "OpenAIError"
    error_schema = {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    answered: dict[str, Any] = {"description": "The answer"}
    if each.answers:
        answered["content"] = {media: {} for media in each.answers}
    operation: dict[str, Any] = {
        "summary": each.about,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", each.path)
        ],
        "responses": {"200": answered}
        | {status: {"description": about, "content": error_schema} for status, about in REFUSALS.items()},
    }
    if each.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": each.body.schema()}}}
    return operation
