"""The command line is frozen: command_line.txt holds every verb, argument and option.

To change it on purpose, run `PYTHONPATH=. python tests/cli/test_command_line.py`.
"""

import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType

from typer.models import ArgumentInfo

from mtrain.cli.main import VERBS, command_line

TABLE = Path(__file__).with_name("command_line.txt")


def typed(annotation: object) -> str:
    """Return a type as users see it: choices, tuples and lists of plain types; no None."""
    arguments = [own for own in typing.get_args(annotation) if own is not NoneType]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, arguments))
    if not arguments:
        return annotation.__name__.lower() if isinstance(annotation, type) else str(annotation)
    text = " ".join(map(typed, arguments))
    return f"{text}, several" if typing.get_origin(annotation) is list else text


def described(parameter: inspect.Parameter, annotation: object) -> str:
    """Return name, type with its bounds, and default of an argument or an option."""
    if typing.get_origin(annotation) is not typing.Annotated:  # Python 3.10 adds None to a default
        (annotation,) = (each for each in typing.get_args(annotation) if each is not NoneType)
    kind, info = typing.get_args(annotation)
    if isinstance(info, ArgumentInfo):
        name = info.metavar or parameter.name
    else:
        declared = [info.default, *(info.param_decls or [])]  # typer takes the first as well
        names = [name for name in declared if isinstance(name, str)]
        name = " ".join(names) or "--" + parameter.name.replace("_", "-")
    least, most = ("" if bound is None else str(bound) for bound in (info.min, info.max))
    bounds = f" {least}..{most}" if least or most else ""
    is_required = parameter.default is inspect.Parameter.empty
    default = "required" if is_required else str(parameter.default)
    return f"  {name:<30}{typed(kind) + bounds:<39} {default}\n"


def table() -> Iterator[str]:
    of_all = command_line(VERBS).info.callback
    assert of_all
    verbs = {"mtrain": of_all}
    verbs |= {f"mtrain {verb}": function for verb, function in VERBS.items()}
    for verb, function in verbs.items():
        yield f"{verb}\n"
        hints = typing.get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            if name != "context":
                yield described(parameter, hints[name])


def test_the_command_line_equals_the_recorded_table() -> None:
    assert TABLE.read_text(encoding="utf-8") == "".join(table()), __doc__


if __name__ == "__main__":
    TABLE.write_text("".join(table()), encoding="utf-8")
