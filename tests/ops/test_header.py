"""The structures that are read from `ops.h` have the layout of C, and all functions are found."""

import ctypes
import re
import subprocess

import pytest

from mtrain.ops import build
from mtrain.ops.header import STRUCTURES, signatures

C_HEADER = (build.CSRC_DIR / "ops.h").read_text(encoding="utf-8")


def test_each_structure_has_the_offsets_and_the_size_that_the_compiler_gives_it(tmp_path):
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    expected = [
        number
        for structure in STRUCTURES.values()
        for number in (
            *(getattr(structure, field[0]).offset for field in structure._fields_),
            ctypes.sizeof(structure),
        )
    ]
    numbers = [
        text
        for name, structure in STRUCTURES.items()
        for text in (
            *(f"offsetof({name}, {field[0]})" for field in structure._fields_),
            f"sizeof({name})",
        )
    ]
    source, library = tmp_path / "layout.c", tmp_path / "layout.so"
    text = f"const long layout[] = {{{', '.join(numbers)}}};"
    source.write_text(f'#include <stddef.h>\n#include "ops.h"\n{text}\n', encoding="utf-8")
    command = [*compiler, "-shared", "-fPIC", f"-I{build.CSRC_DIR}", source, "-o", library]
    subprocess.run(command, check=True)
    layout = (ctypes.c_long * len(numbers)).in_dll(ctypes.CDLL(str(library)), "layout")
    assert list(layout) == expected


def test_each_structure_and_function_of_the_header_is_read():
    assert set(STRUCTURES) == set(re.findall(r"^} (\w+);$", C_HEADER, re.M)) - {"status"}
    names = set(re.findall(r"^status FUNCTION\((\w+)\)", C_HEADER, re.M))
    of_float = set(re.findall(r"^status (\w+_float)\(", C_HEADER, re.M))
    assert set(signatures()) == {
        f"{name}_{elem}" for name in names for elem in build.ELEM_FLAGS
    } | (of_float)


def test_numbers_pointers_and_structures_of_a_function_get_their_types():
    assert signatures()["packed_linear_sparse_float"] == [
        ctypes.POINTER(STRUCTURES["linear_map"]),
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
    ]
    numbers = [ctypes.c_int64, ctypes.c_uint32, ctypes.c_float, ctypes.c_uint32]
    assert signatures()["dropout_bf16"] == [*[ctypes.c_void_p] * 2, *numbers]
    assert signatures()["encode_sources_float"][4] is ctypes.c_void_p
