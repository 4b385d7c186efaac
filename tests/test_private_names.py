"""The private names of other libraries that mtrain uses, and what to do when one is gone."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mtrain"
COMPILED = (
    "without it a layer that cannot be compiled ends the training: look for it in torch.compiler"
)
FOREACH = "it is documented, though not stable: call the operation for each tensor of the list"
PRIVATE = {  # name: what to do without it
    "torch._C._current_graph_task_id": "a call that is recomputed in a backward pass cannot be "
    "told from a new one: refuse dropout under torch.utils.checkpoint",
    "torch._C._get_tracing_state": "torch.jit.is_tracing() says the same, in Python",
    "torch.autograd.forward_ad._current_level": "torch.func.jvp must not meet compiled operations: "
    "refuse tensors for which forward_ad.unpack_dual(tensor).tangent is not None",
    "torch.nn.modules.module._has_any_global_hook": "without it hooks that a user registers for "
    "all modules are not run where a compiled operation replaces one",
    "torch._foreach_copy_": FOREACH,
    "torch._foreach_lerp_": FOREACH,
    "torch._foreach_mul_": FOREACH,
    "torch._foreach_sub_": FOREACH,
    "torch._dynamo.config": COMPILED,
    "torch._functorch.config": COMPILED,
}


def dotted(node: ast.expr) -> list[str]:
    """The parts of `a.b.c`; nothing if it is another expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*inner, node.attr] if inner and isinstance(node, ast.Attribute) else []


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def used(path: Path) -> Iterator[str]:
    """Yield the private names of other libraries in a module, by their full names."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    full: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                root = each.name.partition(".")[0]
                full[each.asname or root] = each.name if each.asname else root
            yield from (each.name for each in node.names if is_private(each.name))
        elif isinstance(node, ast.ImportFrom):
            names = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            yield from filter(is_private, names.values())
            full |= names
    own = {name for name, origin in full.items() if origin.startswith(("mtrain", "__future__"))}
    for node in nodes:
        root, *parts = (isinstance(node, ast.Attribute) and dotted(node)) or [""]
        if root in full and root not in own and is_private(".".join(parts)):
            yield ".".join([full[root], *parts])


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_still_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ImportError:
        assert hasattr(importlib.import_module(module), attribute), PRIVATE[name]


def test_only_the_listed_private_names_are_used() -> None:
    found = {name for path in PACKAGE.rglob("*.py") for name in used(path)}
    whole = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    assert {name for name in whole if not name.startswith("mtrain")} == set(PRIVATE)
