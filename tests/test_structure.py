"""The direction of imports, read from the syntax trees of every module, and what importing the package brings along."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LINE = (
    "errors",
    "versions",
    "_transformers_hook",
    "formats",
    "layouts",
    "kernels",
    "tensors",
    "artifact",
    "models",
    "convert",
    "integrations",
    "cli",
)
"""The layers from left to right; a module imports from its own layer and from those left of it.

DESIGN.md 2 has the line from `formats` on. Left of it stand modules that need next to nothing of the package: the
errors, the report of versions, and the hook that knows the integration by name and calls it once Transformers is there.
"""

PACKAGE = "ninfer_torch"
TORCH_FREE = {"ninfer_torch.artifact.schema", "ninfer_torch.artifact.framing"}
"""Modules that import no torch, nor do the modules of `artifact` that they import."""

MAY_IMPORT_TRANSFORMERS = {"integrations", "cli"}
MAY_IMPORT_THE_PACKAGE = {"cli"}


@dataclass(frozen=True)
class Import:
    """One imported module. `at_import_time` is false inside functions and under `if TYPE_CHECKING`."""

    module: str
    line: int
    at_import_time: bool


def find_modules(root: Path) -> dict[str, Path]:
    """Every module of the project by dotted name."""
    folders = [root / PACKAGE, *(path for path in (root / "integrations").glob("*") if path.is_dir())]
    modules = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def layer_of(module: str, modules: dict[str, Path]) -> str | None:
    """The layer of a module of the project, `ninfer_torch` for the package's `__init__`, None outside the project."""
    top, _, rest = module.partition(".")
    if top == PACKAGE:
        return rest.partition(".")[0] or PACKAGE
    return "integrations" if any(name.partition(".")[0] == top for name in modules) else None


def read_imports(name: str, path: Path, modules: dict[str, Path]) -> list[Import]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]

    def base(node: ast.ImportFrom) -> str:
        above = package[: len(package) - node.level + 1] if node.level else []
        return ".".join([*above, *([node.module] if node.module else [])])

    def submodule(parent: str, child: str) -> str:
        dotted = f"{parent}.{child}"
        return dotted if dotted in modules or (parent == PACKAGE and child in LINE) else parent

    def visit(node: ast.AST, now: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno, now) for alias in names)
            case ast.ImportFrom(names=names):
                yield from (Import(submodule(base(node), alias.name), node.lineno, now) for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(module, node.lineno, now)
            case ast.If(
                test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), body=body, orelse=orelse
            ):
                for child in body:
                    yield from visit(child, False)
                for child in orelse:
                    yield from visit(child, now)
                return
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, now and not deferred)

    return list(visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), True))


def torch_free(modules: dict[str, Path]) -> set[str]:
    """`TORCH_FREE` and what those modules import of their own layer."""
    found: set[str] = set()
    waiting = [name for name in TORCH_FREE if name in modules]
    while waiting:
        name = waiting.pop()
        if name not in found and layer_of(name, modules) == "artifact" and name in modules:
            found.add(name)
            waiting.extend(imported.module for imported in read_imports(name, modules[name], modules))
    return found


def violation(name: str, imported: Import, modules: dict[str, Path], no_torch: set[str]) -> str | None:
    """What is wrong with one import of module `name`, or None."""
    source, target = layer_of(name, modules), layer_of(imported.module, modules)
    library = imported.module.partition(".")[0]
    if source not in MAY_IMPORT_TRANSFORMERS and library == "transformers" and imported.at_import_time:
        return "imports transformers at import time"
    if name in no_torch and library == "torch":
        return "imports torch"
    if source == PACKAGE or target is None or (target == PACKAGE and source in MAY_IMPORT_THE_PACKAGE):
        return None
    if target == PACKAGE:
        return f"imports the package's public names, expected the module that defines them ({imported.module})"
    if target not in LINE or LINE.index(target) > LINE.index(source):
        return f"imports {imported.module}: {target} is not left of {source}"
    return None


def violations(root: Path) -> list[str]:
    """Every import that breaks a rule, as `file:line: reason`."""
    modules = find_modules(root)
    no_torch = torch_free(modules)
    found = []
    for name, path in modules.items():
        where = path.relative_to(root).as_posix()
        if layer_of(name, modules) not in (*LINE, PACKAGE):
            found.append(f"{where}:1: has no place in the line {' <- '.join(LINE)}")
            continue
        for imported in read_imports(name, path, modules):
            if reason := violation(name, imported, modules, no_torch):
                found.append(f"{where}:{imported.line}: {reason}")
    return found


def test_imports_run_from_right_to_left():
    assert violations(ROOT) == []


def test_every_layer_and_every_torch_free_module_exists():
    modules = find_modules(ROOT)
    assert {layer_of(name, modules) for name in modules} == {*LINE, PACKAGE}
    assert modules.keys() >= TORCH_FREE


def write_tree(root: Path, files: dict[str, str]) -> None:
    """A small project that keeps the rules, and `files` in it."""
    kept = {
        "ninfer_torch/__init__.py": "from ninfer_torch.formats import FORMATS\nfrom ninfer_torch.cli import main\n",
        "ninfer_torch/errors.py": "class NinferError(Exception): ...\n",
        "ninfer_torch/versions.py": "import torch\n",
        "ninfer_torch/formats.py": "from ninfer_torch.errors import NinferError\nFORMATS = {}\n",
        "ninfer_torch/kernels/__init__.py": "",
        "ninfer_torch/kernels/ops.py": "from . import reference\nfrom ..formats import FORMATS\n",
        "ninfer_torch/kernels/reference.py": "from ninfer_torch import formats\n",
        "ninfer_torch/artifact/__init__.py": "",
        "ninfer_torch/artifact/schema.py": "from . import records\nfrom ninfer_torch import formats\n",
        "ninfer_torch/artifact/records.py": "import json\n",
        "ninfer_torch/artifact/reader.py": "import torch\nfrom .schema import json\n",
        "ninfer_torch/models/__init__.py": (
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from transformers import PreTrainedModel\n"
            "def build():\n    import transformers\n    return transformers\n"
        ),
        "ninfer_torch/cli/__init__.py": "import ninfer_torch, transformers, ninfer_transformers\ndef main(): ...\n",
        "integrations/ninfer_transformers/__init__.py": "import transformers\nfrom ninfer_torch.models import build\n",
    }
    for name, text in {**kept, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_a_tree_that_keeps_the_rules_has_no_violations(tmp_path):
    write_tree(tmp_path, {})
    assert violations(tmp_path) == []


BROKEN = {
    "absolute": ("formats.py", "import ninfer_torch.layouts", "layouts is not left of formats"),
    "from a module": ("formats.py", "from ninfer_torch.kernels.ops import x", "kernels is not left of formats"),
    "from the package": ("formats.py", "from ninfer_torch import kernels", "kernels is not left of formats"),
    "relative": ("kernels/reference.py", "from ..artifact import schema", "artifact is not left of kernels"),
    "relative in a package": ("kernels/__init__.py", "from ..models import build", "models is not left of kernels"),
    "in a function": ("formats.py", "def f():\n    import ninfer_torch.cli", "cli is not left of formats"),
    "for types only": (
        "formats.py",
        "import typing\nif typing.TYPE_CHECKING:\n    import ninfer_torch.cli",
        "cli is not left of formats",
    ),
    "by name": (
        "formats.py",
        "import importlib\nimportlib.import_module('ninfer_torch.cli')",
        "cli is not left of formats",
    ),
    "errors stand alone": ("errors.py", "import ninfer_torch.versions", "versions is not left of errors"),
    "versions see errors only": ("versions.py", "import ninfer_torch.formats", "formats is not left of versions"),
    "an integration": ("convert/x.py", "import ninfer_transformers.save", "integrations is not left of convert"),
    "from integrations": ("../integrations/other/x.py", "import ninfer_torch.cli.x", "cli is not left of integrations"),
    "a public name": ("convert/x.py", "from ninfer_torch import quantize", "public names"),
    "no layer": ("helpers.py", "", "has no place"),
    "an unknown layer": ("formats.py", "import ninfer_torch.helpers", "helpers is not left of formats"),
    "transformers": ("models/x.py", "import transformers.utils", "transformers at import time"),
    "transformers in the package": ("__init__.py", "from transformers import X", "transformers at import time"),
    "transformers in a class": ("models/x.py", "class A:\n    import transformers", "transformers at import time"),
    "transformers in try": (
        "models/x.py",
        "try:\n    import transformers\nexcept ImportError:\n    pass",
        "transformers at import time",
    ),
    "transformers otherwise": (
        "models/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import transformers",
        "transformers at import time",
    ),
    "torch": ("artifact/framing.py", "import torch.nn", "imports torch"),
    "torch behind a torch-free module": ("artifact/records.py", "import torch", "imports torch"),
    "torch in a function": ("artifact/schema.py", "def f():\n    from torch import nn", "imports torch"),
}


@pytest.mark.parametrize("file, text, reason", BROKEN.values(), ids=BROKEN)
def test_the_checker_finds_each_kind_of_violation(tmp_path, file, text, reason):
    write_tree(tmp_path, {f"ninfer_torch/{file}": text + "\n"})
    found = violations(tmp_path)
    assert len(found) == 1
    assert reason in found[0]
    assert f"{Path(file).name}:" in found[0]


def modules_after(statement: str, folder: Path) -> set[str]:
    """The modules of a fresh process after one statement."""
    code = f"{statement}\nimport sys\nprint('modules:', *sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.rsplit("modules:", 1)[1].split())


def test_importing_the_package_imports_neither_transformers_nor_triton(tmp_path):
    brought = modules_after("import ninfer_torch", tmp_path) - modules_after("import torch", tmp_path)
    assert "ninfer_torch.formats" in brought
    assert brought.isdisjoint({"transformers", "triton", "accelerate", "peft"})
