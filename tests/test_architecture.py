"""The rules of the house, read from the source: who imports whom, what needs no torch, how large a thing may be.

The import table is the one in docs/architecture.md. Imports inside functions and under TYPE_CHECKING count.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "plait"

MODULE_LINES, HALF_OF_MODULES = 400, 200
FUNCTION_LINES, NINE_IN_TEN = 60, 40
PARAMETERS = 6
LEVELS = 3

# torch.distributed's communication, group makers and start-up each have one home.
COMMUNICATION = """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced all_to_all
    all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object irecv isend
    monitored_barrier P2POp recv recv_object_list reduce reduce_scatter reduce_scatter_tensor scatter
    scatter_object_list send send_object_list
"""
HOMES = {
    "parallel/collectives.py": set(COMMUNICATION.split()),
    "parallel/mesh.py": {"DeviceMesh", "init_device_mesh", "new_group", "new_subgroups", "split_group"},
    "parallel/world.py": {"init_process_group", "destroy_process_group"},
}
# Doors beside torch.distributed's front one, and methods that only a ProcessGroup has.
FUNCTIONAL = ("torch.distributed._functional_collectives", "torch.ops._c10d_functional", "torch.ops.c10d")
GROUP_METHODS = {"allgather", "allreduce", "alltoall", "alltoall_base", "_allgather_base", "_reduce_scatter_base"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


# --- reading the source ---------------------------------------------------------------------------------------------


@cache
def trees() -> dict[str, ast.Module]:
    """Path below src/plait -> its syntax tree."""
    return {str(p.relative_to(SOURCE)): ast.parse(p.read_text(), str(p)) for p in sorted(SOURCE.rglob("*.py"))}


def dotted(path: str) -> str:
    """parallel/mesh.py -> plait.parallel.mesh; parallel/__init__.py -> plait.parallel."""
    return ".".join(["plait", *path.removesuffix(".py").split("/")]).removesuffix(".__init__")


def package(path: str) -> str:
    """The package that a file stands in; "" for the files of plait itself."""
    return path.partition("/")[0] if "/" in path else ""


def imported(path: str, tree: ast.Module) -> Iterator[str]:
    """Dotted name of everything that a file imports, wherever in the file; a name of a module counts as module.name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                own = dotted(path).split(".") if path.endswith("__init__.py") else dotted(path).split(".")[:-1]
                base = ".".join([*own[: len(own) - node.level + 1], *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def functions() -> Iterator[tuple[str, Function, ast.ClassDef | None]]:
    """("file:line name", function, the class it is a method of) of the whole source, nested functions included."""
    for path, tree in trees().items():
        owner = {child: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{path}:{node.lineno} {node.name}", node, owner.get(node)


@cache
def table() -> dict[str, tuple[set[str], bool]]:
    """docs/architecture.md's rows: package (or file) -> the packages it may import, whether it may import torch."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w/.]+)` \| (.+?) \| (yes|no|in commands) \|$", text, re.MULTILINE)
    everything = {name for name, _, _ in rows}
    return {
        n: (everything if allowed == "all" else set(allowed.split(", ")), torch != "no") for n, allowed, torch in rows
    }


def row(path: str) -> tuple[set[str], bool]:
    """A file's own row, else its package's."""
    return table().get(path) or table()[package(path)]


# --- who imports whom -----------------------------------------------------------------------------------------------


def test_every_package_stands_in_the_import_table() -> None:
    assert len([name for name in table() if "/" not in name]) == 12
    assert {package(path) for path in trees()} - {""} <= set(table())


def test_packages_import_only_what_the_table_allows() -> None:
    wrong = []
    for path, tree in trees().items():
        for name in imported(path, tree) if package(path) else ():
            root, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            # plait's own __init__ gives the version to anyone; its lazy names are for users.
            if root == "plait" and other not in {package(path), "__version__"} and other not in row(path)[0]:
                wrong.append(f"{path} imports {name}")
    assert not wrong


def test_packages_without_torch_import_none() -> None:
    needs_torch = {"torch", "safetensors", "transformers", "tokenizers"}
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees().items()
        if not package(path) or not row(path)[1]
        for name in imported(path, tree)
        if name.partition(".")[0] in needs_torch
    ]
    assert not wrong


def test_modules_form_no_import_cycle() -> None:
    names = {dotted(path) for path in trees()}
    graph = {}
    for path, tree in trees().items():
        if path == "__init__.py":
            continue  # its names are lazy: they stand for users, not for the package
        found = {name if name in names else name.rpartition(".")[0] for name in imported(path, tree)}
        graph[dotted(path)] = found & names - {"plait"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_lazy_public_names_and_their_typed_imports_agree() -> None:
    import plait

    typed = {
        n.rpartition(".")[2]: n.rpartition(".")[0]
        for n in imported("__init__.py", trees()["__init__.py"])
        if "plait." in n
    }
    assert typed == plait._HOMES
    assert sorted(plait.__all__) == sorted([*plait._HOMES, "__version__"])
    assert all(getattr(plait, name).__module__ == home for name, home in plait._HOMES.items())
    assert not set(plait._HOMES) & set(table()), "a package would hide a public name"


# --- purity ---------------------------------------------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running `code`."""
    shout = "; import sys; print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code + shout], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


TORCH_FREE = ("spec", "placement", "schedule", "planner", "report")


@pytest.mark.parametrize("name", sorted({path.name for path in SOURCE.iterdir()} & set(TORCH_FREE)))
def test_package_loads_without_torch(name: str) -> None:
    modules = [dotted(path) for path in trees() if package(path) == name]
    assert "torch" not in loaded_by("import " + ", ".join(modules))


def test_importing_plait_loads_no_dependency() -> None:
    assert not loaded_by("import plait") & {"torch", "numpy", "pydantic", "rich", "typer"}


def test_help_loads_neither_torch_nor_numpy_nor_rich() -> None:
    assert not loaded_by("from plait.cli.main import main; main(['--help'])") & {"torch", "numpy", "rich"}


@pytest.mark.parametrize("command", ["train", "verify", "show"])
def test_help_of_a_command_loads_no_torch(command: str) -> None:
    assert "torch" not in loaded_by(f"from plait.cli.main import main; main([{command!r}, '--help'])")


# --- size budget ----------------------------------------------------------------------------------------------------


def lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_modules_are_short() -> None:
    sizes = {path: len((SOURCE / path).read_text().splitlines()) for path in trees()}
    assert {path: size for path, size in sizes.items() if size > MODULE_LINES} == {}
    assert median(sizes.values()) <= HALF_OF_MODULES


def test_functions_are_short() -> None:
    sizes = {name: lines(node) for name, node, _ in functions()}
    assert {name: size for name, size in sizes.items() if size > FUNCTION_LINES} == {}
    long = {name: size for name, size in sizes.items() if size > NINE_IN_TEN}
    assert len(long) <= len(sizes) / 10, long


def excepted(node: Function, owner: ast.ClassDef | None) -> bool:
    """Kernels and methods of autograd Functions take what they must."""
    bases = [ast.unparse(base) for base in owner.bases] if owner else []
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(base.endswith("autograd.Function") for base in bases) or any(
        mark in text for text in decorators for mark in ("triton.jit", "custom_op", "register_fake")
    )


def parameters(node: Function, owner: ast.ClassDef | None) -> int:
    spec = node.args
    names = [a.arg for a in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg] if a]
    return len(names) - (owner is not None and names[:1] in (["self"], ["cls"]))


def test_functions_take_few_parameters() -> None:
    counts = {name: parameters(node, owner) for name, node, owner in functions() if not excepted(node, owner)}
    assert {name: count for name, count in counts.items() if count > PARAMETERS} == {}


def levels(node: ast.AST) -> int:
    """Depth of compound statements; an `elif` stands at the level of its `if`, a nested function starts anew."""
    deepest = 0
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, Function | ast.Lambda | ast.ClassDef) or not isinstance(child, ast.AST):
                continue
            nests = isinstance(
                child, ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match | ast.AsyncFor | ast.AsyncWith
            )
            is_elif = (
                field == "orelse" and isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(child, ast.If)
            )
            deepest = max(deepest, levels(child) + (nests and not is_elif))
    return deepest


def test_functions_nest_shallowly() -> None:
    depths = {name: levels(node) for name, node, _ in functions()}
    assert {name: depth for name, depth in depths.items() if depth > LEVELS} == {}


# --- autograd -------------------------------------------------------------------------------------------------------


def test_no_backward_asks_twice_for_what_was_saved() -> None:
    """Each asking unpacks: what is recomputed would be computed again."""
    asked = {
        name: sum(isinstance(part, ast.Attribute) and part.attr == "saved_tensors" for part in ast.walk(node))
        for name, node, _ in functions()
    }
    assert any(asked.values())
    assert {name: times for name, times in asked.items() if times > 1} == {}


# --- words ----------------------------------------------------------------------------------------------------------


def test_nothing_is_named_for_being_leftover() -> None:
    leftovers = {"utils", "util", "common", "core", "helpers", "misc"}
    assert not [path for path in trees() if leftovers & set(path.removesuffix(".py").split("/"))]


def test_every_file_opens_with_a_paragraph() -> None:
    terse = [path for path, tree in trees().items() if len((ast.get_docstring(tree) or "").split()) < 8]
    assert not terse, "say what the file holds and what it must not"


def test_functions_are_named_by_plain_verbs() -> None:
    shy = re.compile(r"_?(get|do|maybe)_|.*_fn$")
    assert not [name for name, node, _ in functions() if shy.match(node.name)]


# --- torch.distributed ----------------------------------------------------------------------------------------------


def aliases(path: str, tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name, of everything that a file imports."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(
                {
                    a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                    for a in node.names
                }
            )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return found


def distributed_uses(path: str, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, dotted name, the file that alone may use it) of each use of torch.distributed that has a home."""
    known = aliases(path, tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        first, *rest = ast.unparse(node).split(".")
        name = ".".join([known.get(first, first), *rest])
        last = name.rpartition(".")[2]
        if name.startswith(FUNCTIONAL) or (isinstance(node, ast.Attribute) and last in GROUP_METHODS):
            yield node.lineno, name, "parallel/collectives.py"
        elif name.startswith("torch.distributed."):
            yield from ((node.lineno, name, home) for home, names in HOMES.items() if last in names)


def test_torch_distributed_is_called_from_its_homes_only() -> None:
    wrong = [
        f"{path}:{line} {name} belongs in {home}"
        for path, tree in trees().items()
        for line, name, home in distributed_uses(path, tree)
        if path != home
    ]
    assert not wrong


# --- the tests themselves -------------------------------------------------------------------------------------------

Check = Callable[[], None]


@pytest.mark.parametrize(
    ("claim", "path", "code"),
    [
        (
            test_packages_import_only_what_the_table_allows,
            "models/a.py",
            "def f():\n    from plait.parallel import mesh",
        ),
        (test_packages_import_only_what_the_table_allows, "spec/a.py", "from ..schedule import actions"),
        (test_packages_import_only_what_the_table_allows, "proof/reference.py", "import plait.train.step"),
        (test_packages_import_only_what_the_table_allows, "spec/a.py", "from plait import load"),
        (test_packages_without_torch_import_none, "schedule/a.py", "def f():\n    import torch.nn"),
        (test_modules_form_no_import_cycle, "spec/a.py", "def f():\n    from plait.spec import a"),
        (test_functions_are_short, "spec/a.py", "def f():\n" + "    x = 1\n" * 60),
        (test_modules_are_short, "spec/units.py", None),
        (test_functions_take_few_parameters, "spec/a.py", "class A:\n    def f(self, a, b, c, d, *e, f, g): ..."),
        (test_functions_nest_shallowly, "spec/a.py", "def f():\n for a in b:\n  if a:\n   with a:\n    while a: ..."),
        (test_nothing_is_named_for_being_leftover, "spec/helpers.py", ""),
        (test_every_file_opens_with_a_paragraph, "spec/a.py", "'''Too little said.'''"),
        (test_functions_are_named_by_plain_verbs, "spec/a.py", "def get_size(): ..."),
        (
            test_torch_distributed_is_called_from_its_homes_only,
            "train/a.py",
            "import torch.distributed as d\nd.all_reduce(x)",
        ),
        (
            test_torch_distributed_is_called_from_its_homes_only,
            "train/a.py",
            "from torch import distributed\ndistributed.isend",
        ),
        (
            test_torch_distributed_is_called_from_its_homes_only,
            "parallel/mesh.py",
            "import torch\ntorch.distributed.send(x)",
        ),
        (
            test_torch_distributed_is_called_from_its_homes_only,
            "train/a.py",
            "from torch.distributed import new_group as n\nn()",
        ),
        (test_torch_distributed_is_called_from_its_homes_only, "train/a.py", "def f(group):\n    group.allreduce(x)"),
    ],
)
def test_a_planted_breach_is_caught(monkeypatch: pytest.MonkeyPatch, claim: Check, path: str, code: str | None) -> None:
    monkeypatch.setattr(sys.modules[__name__], "trees", lambda: {path: ast.parse(code or "")})
    if code is None:
        monkeypatch.setattr(sys.modules[__name__], "MODULE_LINES", 1)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        claim()
