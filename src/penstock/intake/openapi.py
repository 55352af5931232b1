"""The OpenAPI 3.1 document of the webhook endpoint.

Users generate clients from it. A test generates valid and invalid requests from it.
"""

from __future__ import annotations

from typing import Any

from penstock import __version__

_ERROR = {
    "type": "object",
    "required": ["error", "try"],
    "properties": {
        "error": {"type": "string", "description": "what is wrong"},
        "try": {"type": "string", "description": "what to do next"},
        "reasons": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["item", "reason"],
                "properties": {"item": {"type": "integer"}, "reason": {"type": "string"}},
            },
        },
    },
}
_TOLD = {
    "type": "object",
    "required": ["accepted", "known", "passed", "ids"],
    "properties": {
        "accepted": {"type": "integer", "description": "events that are new, and durable now"},
        "known": {"type": "integer", "description": "events whose id was accepted before"},
        "passed": {"type": "integer", "description": "items that the hook's `where` passes over"},
        "ids": {
            "type": "array",
            "items": {"type": "string"},
            "description": "of the events, new and known, in the order of the items",
        },
    },
}
_HINT = {"type": ["string", "null"], "minLength": 1, "maxLength": 512}
_ROUTING = {
    "type": ["object", "null"],
    "description": "route of the event. A part that is null is absent",
    "properties": {
        "geo": _HINT,
        "pool": _HINT,
        "account": _HINT,
        "render": {"type": ["boolean", "null"]},
    },
}
_ITEM = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"url": {"type": "string"}, "routing": _ROUTING},
            "additionalProperties": True,
        },
        {"type": "string", "format": "uri"},
    ]
}
_CLOUD_EVENT = {
    "type": "object",
    "required": ["specversion", "id", "source", "type"],
    "properties": {
        "specversion": {"const": "1.0"},
        "id": {"type": "string", "minLength": 1, "maxLength": 1024},
        "source": {"type": "string", "minLength": 1, "maxLength": 1024},
        "type": {"type": "string", "minLength": 1, "maxLength": 1024},
        "subject": {"type": "string"},
        "time": {"type": "string", "format": "date-time"},
        "data": {},
        "data_base64": {"type": "string"},
    },
    "additionalProperties": True,
}
_REFUSALS = {
    "400": "it cannot be read",
    "401": "it is not signed as the hook asks, or its signature is too old",
    "403": "an unsigned hook, asked from elsewhere than this machine",
    "404": "there is no such hook",
    "405": "another method than POST",
    "408": "the body came too slowly",
    "413": "the body is too large, or has too many items",
    "415": "a content-type that is not read",
    "422": "items that make no event. Nothing of the body was accepted",
    "429": "more requests than the hook or the address may send. Retry-After has the time to wait",
    "431": "its headers are too large",
    "503": "the queue is full or the store unavailable. Nothing was accepted. See Retry-After",
}


def _answer(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def document() -> dict[str, Any]:
    item, event = {"$ref": "#/components/schemas/Item"}, {"$ref": "#/components/schemas/CloudEvent"}
    told, error = {"$ref": "#/components/schemas/Told"}, {"$ref": "#/components/schemas/Error"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock webhooks", "version": __version__},
        "paths": {
            "/hooks/{name}": {
                "post": {
                    "operationId": "tell",
                    "summary": "Something changed: have it scraped",
                    "parameters": [
                        {
                            "name": "name",
                            "in": "path",
                            "required": True,
                            "schema": {
                                "type": "string",
                                "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
                            },
                        },
                        {
                            "name": "Webhook-Id",
                            "in": "header",
                            "schema": {"type": "string", "pattern": "^[!-~]{1,256}$"},
                        },
                        {
                            "name": "Idempotency-Key",
                            "in": "header",
                            "schema": {"type": "string", "pattern": "^[!-~]{1,256}$"},
                        },
                    ],
                    "requestBody": {
                        "required": True,
                        "content": {
                            "application/json": {
                                "schema": {"anyOf": [item, {"type": "array", "items": item}]}
                            },
                            "application/x-ndjson": {"schema": {"type": "string"}},
                            "application/cloudevents+json": {"schema": event},
                            "application/cloudevents-batch+json": {
                                "schema": {"type": "array", "items": event}
                            },
                        },
                    },
                    "responses": {
                        "202": _answer("durable. A repeated id is known and changes nothing", told)
                    }
                    | {status: _answer(text, error) for status, text in _REFUSALS.items()},
                }
            },
            "/healthz": {
                "get": {
                    "operationId": "health",
                    "summary": "It listens",
                    "responses": {
                        "200": _answer(
                            "ok",
                            {
                                "type": "object",
                                "required": ["status"],
                                "properties": {"status": {"const": "ok"}},
                            },
                        )
                    },
                }
            },
        },
        "components": {
            "schemas": {"Item": _ITEM, "CloudEvent": _CLOUD_EVENT, "Told": _TOLD, "Error": _ERROR}
        },
    }
