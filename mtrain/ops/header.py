"""The structures and functions that `ops.h` declares, as ctypes takes them.

The reader knows the forms of declarations in that file, not all of C.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from mtrain.ops import build

_NUMBERS: dict[str, type[Any]] = {
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
}
_TEXT = re.sub(
    r"/\*.*?\*/", "", (build.CSRC_DIR / "ops.h").read_text(encoding="utf-8"), flags=re.DOTALL
)


def _read_structures() -> dict[str, type[ctypes.Structure]]:
    structures: dict[str, type[ctypes.Structure]] = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", _TEXT, re.DOTALL):
        types, fields = _NUMBERS | structures, list[tuple[str, type[Any]]]()
        for of, names in re.findall(r"(?:const )?(\w+) ([^;]*);", body):
            for star, field, size in re.findall(r"(\*?)(\w+)(?:\[(\d+)\])?", names):
                field_type = ctypes.c_void_p if star else types[of]
                fields.append((field, field_type * int(size) if size else field_type))
        structures[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structures


STRUCTURES = _read_structures()


def signatures() -> dict[str, list[type[Any]]]:
    """Return the types of the arguments of each function, by its name in the library."""
    found = dict[str, list[type[Any]]]()
    pattern = r"^status (FUNCTION\()?(\w+)\)?\((.*?)\);"
    for is_generic, name, arguments in re.findall(pattern, _TEXT, re.DOTALL | re.MULTILINE):
        types = [_argument_type(argument) for argument in arguments.split(",")]
        names = (f"{name}_float", f"{name}_bf16") if is_generic else (name,)
        found |= dict.fromkeys(names, types)
    return found


def _argument_type(declaration: str) -> type[Any]:
    kind, pointers = declaration.strip().removeprefix("const ").split(maxsplit=1)
    if pointers.startswith("*") and kind in STRUCTURES:
        return ctypes.POINTER(STRUCTURES[kind])
    return ctypes.c_void_p if "*" in pointers else _NUMBERS[kind]
