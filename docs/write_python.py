"""Print docs/python.md, the page of the Python interface, from its docstrings.

python docs/write_python.py > docs/python.md
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

from pydantic import BaseModel

import mtrain

HEAD = """\
# The Python interface

This page is written by `docs/write_python.py` from the docstrings; `import mtrain` gives these
names. What is promised of them stands in [stability.md](stability.md). The examples are run by a
test, in a folder with `en-de.yaml`, its corpus, and a trained `runs/en-de`.
"""


def signature(name: str, function: Callable[..., object]) -> str:
    """Return a signature as it stands in the code, a line for each argument."""
    found = inspect.signature(function)
    written, kinds = [], [parameter.kind for parameter in found.parameters.values()]
    for parameter in found.parameters.values():
        text = parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        written.append(text)
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        written.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    end = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    short = f"{name}({', '.join(written)}){end}"
    if len(short) <= 90:
        return short
    return "\n".join([f"{name}(", *(f"    {text}," for text in written), f"){end}"])


def entry(title: str, value: object, level: int) -> Iterator[str]:
    """Yield a heading, the signature and the docstring of a name."""
    yield f"{'#' * level} `{title}`\n\n```text"
    without = isinstance(value, type) and issubclass(value, (Exception, BaseModel))
    if callable(value) and not without:
        yield signature(title.rpartition(".")[2], value) + "\n"
    yield f"{inspect.getdoc(value)}\n```\n"


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for name in sorted(set(mtrain.__all__) - {"__version__"}, key=str.lower):
        value = getattr(mtrain, name)
        lines += entry(f"mtrain.{name}", value, 2)
        if value is mtrain.Model:
            for member_name, member in vars(value).items():
                is_method = inspect.isfunction(member) or isinstance(member, property)
                if is_method and not member_name.startswith("_"):
                    lines += entry(f"Model.{member_name}", member, 3)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
