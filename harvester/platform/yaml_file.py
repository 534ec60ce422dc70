"""A YAML file of settings, and its mistakes named by field and line. Decides nothing."""

import os
import re
import stat
from collections.abc import Container, Iterator, Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import NAME_PATTERN, NAME_RULE, unknown_field

M = TypeVar("M", bound=BaseModel)

MAX_FILE_BYTES = 1 << 20

Where = tuple[int | str, ...]
"""A field's path: names, and numbers of list items."""


class FrozenSettings(BaseModel):
    """Base of settings in a file: any field but the declared ones is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 booleans: `mode: off` means "off", not false. A key appears once in its mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    problem = f"{key.value!r} is given twice; the later one would win silently"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def parse_value(text: str) -> Any:
    """A value as a settings file would hold it. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # A text like a date or a number may be an invalid one: 2024-13-45, 0x_, !!bool maybe.
        raise yaml.YAMLError(str(error)) from error
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error


def read_text(path: Path, *, writers: Container[int] | None = None) -> str:
    """Raises ConfigError if the file is unreadable, too large or no text, and if others than
    `writers`, users by number, could have written it."""
    try:
        # Opening a pipe without a writer must not block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if writers is not None and (fault := _distrust(status, writers)):
                raise ConfigError(f"{path}: {fault}")
            raw = file.read(MAX_FILE_BYTES + 1) or b""
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        return raw.decode()
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error


def _distrust(status: os.stat_result, writers: Container[int]) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    if status.st_uid not in writers:
        return f"belongs to user {status.st_uid}: root or the agent's user must own it"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others than its owner may write it: chmod go-w"
    return ""


def parse_fields(text: str, path: Path | None) -> dict[str, Any]:
    """The fields of a file; none of an empty one. Raises ConfigError."""
    try:
        values = parse_value(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: not YAML: {getattr(error, 'problem', error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} line 1: expected `field: value` lines")
    return values


def validated(model: type[M], values: Mapping[str, Any], text: str, path: Path | None) -> M:
    """Raises ConfigError, which names every wrong field and, where it came from the file's text,
    its line."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        mistakes = (_mistake(each, model, text, path) for each in problems if not _follows(each))
        raise ConfigError("; ".join(mistakes)) from error


def _follows(problem: ErrorDetails) -> bool:
    """Whether the problem only follows from faults of a list's items."""
    least = problem.get("ctx", {}).get("min_length", 0)
    return problem["type"] == "too_short" and len(problem["input"]) >= least


def _mistake(problem: ErrorDetails, model: type[BaseModel], text: str, path: Path | None) -> str:
    where, message = problem["loc"], problem["msg"]
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        message = unknown_field(str(where[-1]), _fields_at(model, where[:-1]))
    elif problem.get("ctx", {}).get("pattern") == NAME_PATTERN:
        message = NAME_RULE
    mistake = named(where, message, text, path)
    # A field that is missing at the top level has no line, so the message names the file.
    at_top = problem["type"] == "missing" and path is not None and len(where) == 1
    return f"{path}: {mistake}" if at_top else mistake


def _fields_at(model: type[BaseModel], where: Where) -> set[str]:
    """Names of the fields allowed at `where`."""
    fields: dict[str, Any] = dict(_fields_of(model))
    for step in where:
        if step in fields:  # Other steps are an item's number, a key, or the kind of a union.
            fields = dict(_fields_of(fields[str(step)]))
    return {*fields}


def _fields_of(kind: Any) -> Iterator[tuple[str, Any]]:
    """Names and types of the fields of the models and dataclasses in a type."""
    if isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind)):
        for name, field in signature(kind).parameters.items():
            yield name, field.annotation
    for part in get_args(kind):
        yield from _fields_of(part)


def named(where: Where, message: str, text: str, path: Path | None) -> str:
    """One mistake with its field and its line."""
    field = ".".join(str(step) for step in where) or "configuration"
    line = _line_of(text, where)
    place = f"{path} line {line}: " if path is not None and line is not None else ""
    return f"{place}{field}: {message}"


@lru_cache(maxsize=2)
def _composed(text: str) -> yaml.Node | None:
    return yaml.compose(text) if text else None


def _line_of(text: str, where: Where) -> int | None:
    """The line of the deepest part of `where` that the file has; None without one."""
    node = _composed(text)
    line: int | None = None
    for step in where:
        child = None
        if isinstance(node, yaml.MappingNode):
            child = next(((k, v) for k, v in node.value if k.value == str(step)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            child = (node.value[step],) * 2 if step < len(node.value) else None
        if child is None:
            break
        line, node = child[0].start_mark.line + 1, child[1]
    return line
