"""Recipes from outside: a Python file with `configure(model, recipe, sources)`, and one-line settings."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_torch.convert.methods import default_method, get_method
from ninfer_torch.convert.recipes import Recipe
from ninfer_torch.errors import ConversionError, NinferError
from ninfer_torch.formats import get_format

__all__ = ["Configure", "Setting", "load_recipe", "parse_setting", "public_arguments"]

Configure = Callable[..., None]
"""configure(model: RecipeModel, recipe: Recipe, sources: Mapping[str, MatchedSource])."""

_PATH_ARGUMENTS = ("imatrix",)


def load_recipe(path: str | os.PathLike[str]) -> Configure:
    """The `configure` of a recipe file. Raises ConversionError, naming the file, where it fails to run or has none."""
    path = Path(path)
    if not path.is_file():
        raise ConversionError(f"{path}: no such recipe file")
    try:
        found = runpy.run_path(str(path), run_name=path.stem).get("configure")
    except Exception as error:
        raise ConversionError(f"{path.name}: the recipe cannot be read: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConversionError(f"{path.name}: expected a function configure(model, recipe, sources), found none")

    def configure(*arguments: Any) -> None:
        try:
            found(*arguments)
        except NinferError as error:
            raise ConversionError(f"{path.name}: {error}") from error
        except Exception as error:
            raise ConversionError(f"{path.name}: configure failed: {type(error).__name__}: {error}") from error

    return configure


@dataclass(frozen=True)
class Setting:
    """`SELECTOR=FORMAT[:METHOD[:NAME=VALUE,...]]`: one assignment of a command line.

    Without a method the selection keeps its own where that writes the format, and otherwise takes the format's usual
    one. Values are JSON, or text where they are not. The names `source` and `activation_policy` mean what they mean for
    `Recipe.assign`; all others are parameters of the method.
    """

    selector: str
    format: str
    method: str | None
    parameters: Mapping[str, Any] | None
    assignment: Mapping[str, Any]

    def apply(self, recipe: Recipe) -> None:
        """Assign. Raises ConversionError naming the selector."""
        for name in recipe.model.match(self.selector):
            method = self._method(recipe, name)
            parameters = {} if self.parameters is None and method is not None else self.parameters
            recipe.assign(name, self.format, method=method, parameters=parameters, **self.assignment)

    def _method(self, recipe: Recipe, name: str) -> str | None:
        if self.method is not None:
            return self.method
        current = recipe.selections(name)[0].method
        if not isinstance(current, str) or self.format in get_method(current).targets:
            return None
        return default_method(self.format).name

    def __str__(self) -> str:
        shown = [self.selector, "=", self.format]
        members = {**public_arguments(self.parameters or {}), **self.assignment}
        if self.method or members:
            shown.append(f":{self.method or ''}")
        if members:
            shown.append(":" + ",".join(f"{name}={_text(value)}" for name, value in members.items()))
        return "".join(shown)


def parse_setting(text: str) -> Setting:
    """A setting from its text. Raises ConversionError for another form, FormatError for an unknown format."""
    selector, equals, rest = text.partition("=")
    target, _, more = rest.partition(":")
    method, _, listed = more.partition(":")
    if not (selector and equals and target):
        raise ConversionError(f"setting {text!r}: expected SELECTOR=FORMAT[:METHOD[:NAME=VALUE,...]]")
    if method:
        get_method(method)
    parameters: dict[str, Any] = {}
    for item in filter(None, listed.split(",")):
        name, equals, value = item.partition("=")
        if not (name and equals):
            raise ConversionError(f"setting {text!r}: found {item!r}, expected NAME=VALUE")
        parameters[name] = _value(value)
    assignment: dict[str, Any] = {}
    for name in ("source", "activation_policy"):
        if name in parameters:
            assignment[name] = parameters.pop(name)
    return Setting(selector, get_format(target).name, method or None, parameters or None, assignment)


def public_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Method parameters as they may be written down: of a path only the file's name."""
    return {
        name: Path(value).name if name in _PATH_ARGUMENTS and isinstance(value, str) else value
        for name, value in parameters.items()
    }


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
