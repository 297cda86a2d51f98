"""What all bodies have in common: strict types, and an error for every field that would have no effect."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from outrider.serve.errors import APIError, from_validation

B = TypeVar("B", bound="Body")


def refuse(why: str, param: str | None = None) -> PydanticCustomError:
    """An error of our own words, to be raised while a body is validated."""
    return PydanticCustomError("outrider", "{why}", {"why": why, "param": param})


class Body(BaseModel):
    """A JSON object. Numbers are not read from strings, nor strings from numbers; NaN and infinity are refused.

    refused: fields that OpenAI's API has and this server does not, with what to do instead; null is let through.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = dict(values)
        known = [item.alias or name for name, item in cls.model_fields.items()]
        for name in values:
            if name in known:
                continue
            if name in cls.refused:
                if kept.pop(name) is not None:
                    raise refuse(f"{name} is not supported: {cls.refused[name]}", name)
                continue
            near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else f". Known: {', '.join(sorted(known))}."
            raise refuse(f"unknown field {name[:64]!r}{hint}", name[:64])
        return kept


def read(cls: type[B], body: bytes) -> B:
    """A body from its bytes. Raises APIError (400) that says what is wrong and where."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise APIError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise from_validation(error) from None
    except RecursionError:
        raise APIError(400, "the body is nested too deeply", code="invalid_json") from None
