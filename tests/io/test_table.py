"""The columns of a table are aligned on a terminal, for any text in the cells."""

import pytest

from mtrain.io.table import format_table
from mtrain.io.text_width import num_columns


def test_text_is_aligned_to_the_left_and_numbers_to_the_right() -> None:
    rows = [["name", "lines", "BLEU"], ["short", "1,014", "9.50"], ["a longer name", "8", ""]]
    assert format_table(rows, "<>>") == [
        "name           lines  BLEU",
        "short          1,014  9.50",
        "a longer name      8",
    ]
    assert format_table([], "<>") == []


def test_wide_characters_and_combining_marks_are_aligned_by_their_display_width() -> None:
    lines = format_table([["中文", "1"], ["e\u0301", "22"], ["abcd", "3"]], "<>")
    assert lines == ["中文   1", "e\u0301     22", "abcd   3"]
    assert {num_columns(line) for line in lines} == {8}


@pytest.mark.parametrize("rows", [[["a"]], [["a", "b"], ["a"]]])
def test_a_row_with_the_wrong_number_of_cells_is_refused(rows: list[list[str]]) -> None:
    with pytest.raises(ValueError, match="argument"):
        format_table(rows, "<>")
