"""Reading of lines and atomic writing: line ends, refused input, and failures."""

import bz2
import errno
import gzip
import lzma
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest
from fork_server import needs_fork_server, run_in_child
from hypothesis import given
from hypothesis import strategies as st
from tasks import kill_at_call

from mtrain.errors import DataError, WriteError
from mtrain.io import atomic
from mtrain.io import lines as lines_module

NOT_LINE_ENDS = ["\u2028", "\u2029", "\u0085", "\v", "\f", "\x1c", "\x1d", "\x1e", "\r"]


def lines_of(path: Path, raw: bytes) -> list[str]:
    path.write_bytes(raw)
    return list(lines_module.read_lines(path))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("character", NOT_LINE_ENDS)
def test_only_a_line_feed_ends_a_line(here: Path, character: str) -> None:
    text = f"a{character}b"
    assert lines_of(here / "f", f"{text}\nc\n".encode()) == [text, "c"]


@pytest.mark.parametrize(
    ("raw", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"a", ["a"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\r\nb", ["a\r", "b"]),
        (b"a\rb\n", ["a\rb"]),
        (b"a\r", ["a"]),
        (b"\r\n", [""]),
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"]),
        (b"a\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfa\n", ["\ufeffa"]),
        ("\N{SNOWMAN} a\u0308\n".encode(), ["\N{SNOWMAN} a\u0308"]),
        (b" a \t\n", [" a \t"]),
        (b"\x00\n", ["\x00"]),
    ],
)
def test_a_file_is_split_into_lines(here: Path, raw: bytes, lines: list[str]) -> None:
    assert lines_of(here / "f.txt", raw) == lines
    assert lines_of(here / "f.gz", gzip.compress(raw)) == lines
    assert list(lines_module.read_forgiving(here / "f.txt", pytest.fail)) == lines
    assert list(lines_module.read_forgiving(here / "f.gz", pytest.fail)) == lines


def test_a_truncated_gzip_file_is_refused(here: Path) -> None:
    with pytest.raises(DataError) as error:
        lines_of(Path("f.gz"), gzip.compress(os.urandom(999).hex().encode())[:-20])
    assert str(error.value) == "f.gz: must be whole, but its gzip data is cut off or damaged."


@pytest.mark.parametrize("raw", [b"plain\n", gzip.compress(b"a\n", mtime=0) + b"plain\n"])
def test_a_file_with_the_suffix_gz_that_has_other_bytes_is_refused(here: Path, raw: bytes) -> None:
    with pytest.raises(DataError) as error:
        lines_of(Path("f.gz"), raw)
    assert str(error.value) == (
        "f.gz: must be gzip data to its end, but is not: Not a gzipped file (b'pl')."
    )


def test_a_damaged_gzip_file_is_refused(here: Path) -> None:
    raw = bytearray(gzip.compress(b"some words that take some room\n" * 99))
    raw[10] = 0xFF
    with pytest.raises(DataError, match=r"^f\.gz: "):
        lines_of(Path("f.gz"), bytes(raw))


def test_bytes_that_are_not_utf8_are_refused_with_file_and_line(here: Path) -> None:
    with pytest.raises(DataError) as error:
        lines_of(Path("f"), b"a\nb\nlatin \xe4 x\n")
    assert str(error.value) == "f:3: must be UTF-8, but has byte 0xe4 at byte 7 of the line."


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("f.xz", lzma.compress(b"a\n"), "xz data does: unpack it, or gzip it"),
        ("f.bz2", bz2.compress(b"a\n"), "bzip2 data does: unpack it, or gzip it"),
        ("f", gzip.compress(b"a\n", mtime=0), "gzip data does: let the file's name end in .gz"),
        (
            "f",
            "\ufeffä".encode("utf-16-le"),
            "UTF-16 text does: convert it, for example with iconv",
        ),
    ],
    ids=["xz", "bzip2", "gzip", "utf-16"],
)
def test_a_file_in_another_format_is_refused_and_the_format_is_named(
    here: Path, name: str, content: bytes, form: str
) -> None:
    with pytest.raises(DataError) as error:
        lines_of(Path(name), content)
    said = str(error.value)
    assert said.startswith(f"{name}:1: must be UTF-8, but has byte 0x")
    assert said.endswith(f" of the line, which begins as {form}.")
    warnings: list[str] = []
    assert list(lines_module.read_forgiving(Path(name), warnings.append))
    assert warnings[0].endswith(f", which begins as {form}; replaced by U+FFFD.")


def test_lines_before_an_invalid_line_are_yielded(here: Path) -> None:
    Path("f").write_bytes(b"a\nb\n\xff\n")
    lines = lines_module.read_lines(Path("f"))
    assert [next(lines), next(lines)] == ["a", "b"]
    with pytest.raises(DataError):
        next(lines)


def test_a_surrogate_in_utf8_is_refused(here: Path) -> None:
    with pytest.raises(DataError, match=r"^f:1: must be UTF-8"):
        lines_of(Path("f"), "\ud800".encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    ("path", "why"), [("absent", "No such file or directory"), (".", "Is a directory")]
)
def test_a_file_that_cannot_be_read_is_named(here: Path, path: str, why: str) -> None:
    said = f"{path}: cannot be read: {why}."
    with pytest.raises(DataError) as error:
        list(lines_module.read_lines(Path(path)))
    assert str(error.value) == said
    with pytest.raises(DataError) as error:
        list(lines_module.read_forgiving(Path(path), pytest.fail))
    assert str(error.value) == said


def test_forgiving_reading_replaces_invalid_bytes_warns_and_continues(here: Path) -> None:
    warnings: list[str] = []
    (here / "f").write_bytes(b"a\nb\xffc\nd\n")
    assert list(lines_module.read_forgiving(here / "f", warnings.append)) == ["a", "b\ufffdc", "d"]
    assert warnings == [
        "line 2: is not UTF-8: byte 0xff at byte 2 of the line; replaced by U+FFFD."
    ]


def test_the_first_five_lines_that_are_not_utf8_are_named_and_the_remaining_ones_counted(
    here: Path,
) -> None:
    warnings: list[str] = []
    (here / "f").write_bytes(b"gr\xfcn\n" * 1205)
    assert len(list(lines_module.read_forgiving(here / "f", warnings.append))) == 1205
    assert [text.partition(":")[0] for text in warnings[:-1]] == [
        f"line {number}" for number in range(1, 6)
    ]
    assert warnings[-1] == "1,200 more lines: not UTF-8."


def test_one_more_line_that_is_not_utf8_is_counted_in_the_singular(here: Path) -> None:
    warnings: list[str] = []
    (here / "f").write_bytes(b"gr\xfcn\n" * 6)
    assert len(list(lines_module.read_forgiving(here / "f", warnings.append))) == 6
    assert warnings[-1] == "1 more line: not UTF-8."


no_line_end = st.text(st.characters(codec="utf-8", exclude_characters="\n")).filter(
    lambda line: not line.endswith("\r")
)


@given(
    raw=st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\xef\xbb\xbf", b"\xc3\xa4", b"\xc3"])),
    block_bytes=st.integers(1, 6),
)
def test_lines_read_in_blocks_equal_lines_read_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, raw: list[bytes], block_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "f"
    path.write_bytes(b"".join(raw))
    warnings: list[str] = []
    expected = list(lines_module.read_forgiving(path, warnings.append))
    lines = []
    with pytest.MonkeyPatch.context() as patch, suppress(DataError):
        patch.setattr(lines_module, "_BLOCK_BYTES", block_bytes)
        for line in lines_module.read_lines(path):
            lines.append(line)
    if warnings:
        bad = int(warnings[0].split()[1].removesuffix(":"))
        assert lines == expected[: bad - 1]
    else:
        assert lines == expected


def test_blocks_contain_all_lines_in_order_and_at_most_the_given_number(here: Path) -> None:
    (here / "in").write_text("".join(f"{n}\n" for n in range(10)), encoding="utf-8")
    blocks = list(lines_module.read_blocks(Path("in"), lambda _: None, 4))
    assert [len(block) for block in blocks] == [4, 4, 2]
    assert [line for block in blocks for line in block] == [str(n) for n in range(10)]
    (here / "empty").write_bytes(b"")
    assert list(lines_module.read_blocks(Path("empty"), lambda _: None, 4)) == []


def test_a_block_ends_when_its_lines_are_very_long(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "_MAX_BLOCK_CHARACTERS", 10)
    (here / "in").write_text("a" * 11 + "\nb\n" + "c" * 6 + "\n" + "d" * 6 + "\n", "utf-8")
    blocks = list(lines_module.read_blocks(Path("in"), lambda _: None, 4))
    assert [[line[0] for line in block] for block in blocks] == [["a"], ["b", "c", "d"]]


def test_lines_of_a_pipe_are_yielded_while_the_pipe_is_open_but_idle(here: Path) -> None:
    os.mkfifo("pipe")
    blocks = lines_module.read_blocks(Path("pipe"), lambda _: None, 100)
    writer = os.open("pipe", os.O_RDWR)
    try:
        os.write(writer, b"one\ntwo\n")
        assert next(blocks) == ["one", "two"]
        assert next(blocks) == []  # the pipe is idle
        os.write(writer, b"three\n")
        assert next(blocks) == ["three"]
    finally:
        os.close(writer)
    assert list(blocks) == [[]]


def test_the_process_exits_while_its_stdin_is_still_open() -> None:
    script = "from mtrain.io import lines; print(next(lines.read_blocks(None, print, 9)))"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"one\ntwo\n")
        process.stdin.flush()
        code = process.wait(60)  # while the pipe is still open
        out, err = process.communicate()
    assert (code, out, err) == (0, b"['one', 'two']\n", b"")


def test_an_error_is_raised_after_the_lines_before_it_are_yielded(here: Path) -> None:
    (here / "in.gz").write_bytes(gzip.compress(b"line\n" * 50_000)[:-20])
    blocks = lines_module.read_blocks(Path("in.gz"), lambda _: None, 1000)
    assert next(blocks) == ["line"] * 1000
    with pytest.raises(DataError, match=r"^in\.gz: must be whole"):
        list(blocks)


@given(st.lists(no_line_end).filter(lambda lines: not lines or not lines[0].startswith("\ufeff")))
def test_written_lines_are_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines"
    atomic.write_lines(path, lines)
    assert list(lines_module.read_lines(path)) == lines
    assert path.read_bytes() == "".join(f"{line}\n" for line in lines).encode()


def test_a_file_appears_only_when_complete_and_its_folders_are_created(here: Path) -> None:
    with atomic.whole_file(Path("a/b/f")) as beside:
        beside.write_text("x")
        assert not Path("a/b/f").exists()
    assert Path("a/b/f").read_text() == "x"
    assert left(here / "a/b") == ["f"]


def test_an_exception_leaves_no_file_behind(here: Path) -> None:
    def broken() -> None:
        with atomic.whole_file(Path("f")) as beside:
            beside.write_text("x")
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert left(here) == []


def test_an_exception_keeps_the_old_file(here: Path) -> None:
    Path("f").write_text("old")

    def broken() -> Iterator[str]:
        yield "new"
        raise KeyError

    with pytest.raises(KeyError):
        atomic.write_lines(Path("f"), broken())
    assert left(here) == ["f"]
    assert Path("f").read_text() == "old"


@pytest.mark.parametrize("whole", [atomic.whole_file, atomic.whole_dir])
def test_a_failed_write_removes_the_parent_folders_that_it_created(
    here: Path, whole: Callable[[Path], AbstractContextManager[Path]]
) -> None:
    (here / "kept").mkdir()
    with pytest.raises(WriteError), whole(here / "kept" / "new" / "a" / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(here.rglob("*")) == [here / "kept"]


def test_a_written_file_replaces_the_old_one(here: Path) -> None:
    atomic.write_lines(Path("f"), ["old", "old"])
    atomic.write_lines(Path("f"), ["new"])
    assert left(here) == ["f"]
    assert Path("f").read_text() == "new\n"


def test_a_written_folder_replaces_the_old_one(here: Path) -> None:
    for name in ("old", "new"):
        with atomic.whole_dir(Path("a/d")) as beside:
            (beside / name).mkdir()
            (beside / name / "f").write_text(name)
    assert left(here / "a") == ["d"]
    assert left(here / "a/d") == ["new"]


def test_a_link_to_a_folder_is_replaced_and_its_target_is_kept(here: Path) -> None:
    Path("target").mkdir()
    Path("target/old").write_text("old")
    Path("d").symlink_to("target")
    Path(".d.0123abcd.old").symlink_to("target")  # of a killed process
    with atomic.whole_dir(Path("d")) as beside:
        (beside / "new").write_text("new")
    atomic.sweep(Path("d"))
    assert left(here) == ["d", "target"]
    assert (left(here / "d"), left(here / "target")) == (["new"], ["old"])


def test_a_sweep_keeps_temporary_files_of_other_outputs_and_of_users(here: Path) -> None:
    Path(".d.0123abcd.tmp").touch()  # of a killed process
    kept = [".d.backup.old", ".d.other.0123abcd.tmp", ".d.txt.tmp"]
    for name in kept:
        Path(name).touch()
    atomic.sweep(Path("d"))
    assert left(here) == kept


@pytest.mark.parametrize("name", ["out[1]", "out*", "out?"])
def test_the_name_of_a_folder_is_no_pattern_for_what_killed_processes_left(
    here: Path, name: str
) -> None:
    Path(f".{name}.0123abcd.tmp").mkdir()
    Path(".out1.0123abcd.tmp").mkdir()
    atomic.sweep(Path(name))
    assert left(here) == [".out1.0123abcd.tmp"]


def replaced_and_killed(directory: Path, kill_at: int) -> None:
    num_calls = kill_at_call(("fsync", "replace", "rmdir", "unlink", "mkdir"), kill_at)
    with atomic.whole_dir(directory / "d") as beside:
        for name in ("one", "two"):
            (beside / name).write_text("new")
    (directory / "count").write_text(str(num_calls()))


@needs_fork_server
def test_a_kill_while_a_folder_is_replaced_leaves_either_the_old_or_the_new_folder(
    tmp_path: Path,
) -> None:
    moment, found = 0, []
    while not (tmp_path / "count").exists():
        moment += 1
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        (tmp_path / "d").mkdir()
        for name in ("one", "two"):
            (tmp_path / "d" / name).write_text("old")
        assert run_in_child(replaced_and_killed, tmp_path, moment) in (0, -signal.SIGKILL)
        atomic.sweep(tmp_path / "d")
        assert set(left(tmp_path)) <= {"d", "count"}
        found.append({(tmp_path / "d" / name).read_text() for name in ("one", "two")})
    assert found == sorted(found, key=lambda contents: contents == {"new"})
    assert {"old"} in found and {"new"} in found and {"old", "new"} not in found


def test_a_folder_that_cannot_be_renamed_into_place_leaves_the_old_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise PermissionError(errno.EACCES, "Permission denied")
        return replace(path, target)

    Path("d").mkdir()
    Path("d/f").write_text("old")
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(WriteError), atomic.whole_dir(Path("d")):
        pass
    assert left(here) == ["d"]
    assert Path("d/f").read_text() == "old"


def test_an_exception_leaves_no_folder_and_keeps_the_old_one(here: Path) -> None:
    with atomic.whole_dir(Path("d")) as beside:
        (beside / "old").write_text("old")

    def broken(name: str) -> None:
        with atomic.whole_dir(Path(name)) as beside:
            (beside / "new").write_text("new")
            raise KeyError

    for name in ("d", "e"):
        with pytest.raises(KeyError):
            broken(name)
    assert left(here) == ["d"]
    assert left(here / "d") == ["old"]


def test_writing_below_a_file_or_onto_a_folder_is_an_error(here: Path) -> None:
    Path("file").write_text("x")
    Path("folder").mkdir()
    for path in (Path("file/f"), Path("folder")):
        with pytest.raises(WriteError, match=rf"^{path}: cannot be written: .+\.$"):
            atomic.write_lines(path, ["x"])
    assert left(here) == ["file", "folder"]


def test_writing_to_a_pipe_keeps_the_pipe(here: Path) -> None:
    """A pipe or a device, such as /dev/null, is not replaced by a file."""
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    atomic.write_lines(Path("pipe"), ["a", "b"])
    received = os.read(reader, 100)
    os.close(reader)
    assert Path("pipe").is_fifo()
    assert received == b"a\nb\n"


def test_a_link_to_an_open_file_descriptor_is_written_through_and_kept(here: Path) -> None:
    with Path("out").open("wb") as opened:
        Path("link").symlink_to(f"/dev/fd/{opened.fileno()}")
        atomic.write_lines(atomic.resolve_links(Path("link")), ["a", "b"])
    assert Path("link").is_symlink()
    assert Path("out").read_text() == "a\nb\n"
    assert left(here) == ["link", "out"]


def test_a_link_is_followed_if_it_is_resolved_first_and_is_replaced_otherwise(here: Path) -> None:
    Path("folder").mkdir()
    Path("second").symlink_to("folder/file")  # the target does not exist yet
    Path("first").symlink_to("second")
    atomic.write_lines(atomic.resolve_links(Path("first")), ["a"])
    assert Path("first").is_symlink()
    assert Path("second").is_symlink()
    assert left(here / "folder") == ["file"]
    atomic.write_lines(Path("first"), ["b"])
    assert not Path("first").is_symlink()
    assert Path("folder/file").read_text() == "a\n"


def test_a_cycle_of_links_is_an_error(here: Path) -> None:
    Path("a").symlink_to("b")
    Path("b").symlink_to("a")
    with pytest.raises(WriteError, match=r"^[ab]: cannot be written: Too many levels of symbolic"):
        atomic.write_lines(atomic.resolve_links(Path("a")), ["x"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("folder", "folder: cannot be written: Is a directory."),
        ("", ".: cannot be written: Is a directory."),
        ("/", "/: cannot be written: Is a directory."),
        ("file/f", "file/f: cannot be written: Not a directory."),
    ],
)
def test_a_path_that_cannot_be_a_file_is_refused_before_the_first_line_is_generated(
    here: Path, name: str, said: str
) -> None:
    Path("file").write_text("x")
    Path("folder").mkdir()
    with pytest.raises(WriteError) as error:
        atomic.write_lines(Path(name), (pytest.fail("a line was made") for _ in range(1)))
    assert str(error.value) == said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_device_is_named() -> None:
    with pytest.raises(WriteError) as error:
        atomic.write_lines(Path("/dev/full"), ["x"])
    assert str(error.value) == "/dev/full: cannot be written: No space left on device."


def test_the_target_of_a_link_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(WriteError, match=r"link: cannot be written"):
        atomic.append(tmp_path / "link", b"{}")
    assert not (tmp_path / "other").exists()
