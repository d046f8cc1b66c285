import errno
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from jaxlm.core.errors import InputError
from jaxlm.data import sources
from jaxlm.data.config import DataConfig
from jaxlm.data.dataset import prepare
from jaxlm.data.formats import Broken, cut
from jaxlm.data.formats import read as read_part
from jaxlm.data.scan import Split, scan_source
from jaxlm.data.sources import find_sources

WORDS = [f"document {i} of the text" for i in range(400)]


def write(path: Path, content: str | bytes = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def find_files(text: list[str], said: list[str] | None = None) -> list[Path]:
    (source,) = find_sources(DataConfig(text=text), print)
    (said if said is not None else []).extend(source.remarks)
    return list(source.files)


def read(*files: Path) -> list[str | Broken]:
    return [item for part in cut(files, "text") for item in read_part(part)]


def split(documents: list[str], held_out: float) -> tuple[list[str], list[str]]:
    """Return (training, held-out) documents."""
    sides = [Split(held_out, alone=len(documents) == 1).divide(text) for text in documents]
    return [text for text, _ in sides if text], [text for _, text in sides if text]


@pytest.fixture
def tree(tmp_path):
    """A folder of three text files and one other file."""
    for name in ("b.txt", "a.md", "deep/er/c.py", "deep/picture.png"):
        write(tmp_path / name)
    return tmp_path


def names(files: list[Path]) -> list[str]:
    return [path.name for path in files]


def test_a_file_means_itself(tree):
    assert find_files([str(tree / "b.txt")]) == [tree / "b.txt"]


def test_a_directory_means_the_text_files_under_it(tree):
    assert names(find_files([str(tree)])) == ["a.md", "b.txt", "c.py"]


def test_a_glob_means_the_text_files_it_matches(tree):
    assert names(find_files([str(tree / "*")])) == ["a.md", "b.txt"]
    assert names(find_files([str(tree / "**" / "*.py")])) == ["c.py"]


def test_folders_behind_links_belong_to_a_directory(tree):
    write(tree / "elsewhere" / "in" / "d.txt")
    (tree / "root").mkdir()
    (tree / "root" / "link").symlink_to(tree / "elsewhere")
    (tree / "root" / "also").symlink_to(tree / "elsewhere" / "in")
    assert find_files([str(tree / "root")]) == [tree / "root" / "also" / "d.txt"]
    assert names(find_files([str(tree / "root" / "**")])) == ["d.txt"]


def test_links_that_lead_back_end(tree):
    (tree / "deep" / "er" / "up").symlink_to(tree)
    (tree / "deep" / "here").symlink_to(tree / "deep")
    (tree / "deep" / "nowhere").symlink_to(tree / "gone")
    (tree / "a").symlink_to(tree / "z")
    (tree / "z").symlink_to(tree / "a")
    assert find_files([str(tree)]) == [tree / "a.md", tree / "b.txt", tree / "deep" / "er" / "c.py"]


def test_links_to_texts_that_are_gone_are_named_when_they_are_read(tree):
    (tree / "deep" / "gone.txt").symlink_to(tree / "nowhere.txt")
    (tree / "deep" / "round.md").symlink_to(tree / "deep" / "round.md")
    for entry in (tree / "deep", tree / "deep" / "*"):
        broken = [item for item in read(*find_files([str(entry)])) if isinstance(item, Broken)]
        assert [Path(item.where).name for item in broken] == ["gone.txt", "round.md"]
        assert all("cannot be read" in item.why for item in broken)


def test_folders_that_a_glob_matches_besides_files_are_said_not_to_be_read(tree):
    said: list[str] = []
    (tree / "deep" / "picture.png").unlink()
    assert names(find_files([str(tree / "*")], said)) == ["a.md", "b.txt"]
    (line,) = said
    assert f"{tree}/* also matches the folder {tree}/deep, which is not read; add it to read it" in line
    said.clear()
    find_files([str(tree / "*.txt"), str(tree / "**")], said)
    for rest in (str(tree / "*" / "**"), str(tree / "deep")):
        assert names(find_files([str(tree / "*"), rest], said))[-1] == "c.py"
    assert not said
    assert names(find_files([str(tree / "*"), str(tree / "*" / "**")])) == ["a.md", "b.txt", "c.py"]


@pytest.mark.parametrize("entry", ["", "**"])
def test_files_of_a_folder_that_are_not_read_are_named(tree, entry):
    """One of each suffix first, and none of a tool's own."""
    for name in ("0.pdf", "1.pdf", "2.pdf", "3.pdf", "4.pdf", "x.docx", "README", ".hidden/notes.rst", ".DS_Store"):
        write(tree / name)
    said: list[str] = []
    find_files([str(tree / entry)], said)
    (line,) = said
    assert line.startswith("data.text: 8 files are not read: 0.pdf, README, picture.png, x.docx, 1.pdf and 3 more; ")
    assert ".txt" in line and "\n" not in line
    find_files([str(tree / "a.md"), str(tree / "deep" / "er")], said)
    assert len(said) == 1


def test_what_is_not_read_is_said_when_text_is_first_read(tree, tmp_path):
    said: list[str] = []
    for number in range(40):
        write(tree / f"{number}.txt", f"document {number}")
    data = DataConfig(text=str(tree), tokenizer="bytes", held_out=0.4, cache=str(tmp_path / "cache"))
    for times in (1, 1):
        prepare(data, 257, said.append)
        assert len([line for line in said if "not read" in line]) == times


def test_a_folder_without_text_says_what_is_there(tmp_path):
    write(tmp_path / "book.epub")
    with pytest.raises(InputError, match=r"no \.txt, .* files under .*; 1 file is there: book\.epub$"):
        find_files([str(tmp_path)])


@pytest.mark.parametrize(
    ("size", "documents", "share"),
    [
        (5_000_000, None, 0.1),
        (50_000_000, None, 0.02),
        (1_000_000_000, None, 0.01),
        (100_000_000_000, None, 0.0005),
        (100_000_000_000, 1000, 0.1),
        (100_000_000_000, 1_000_000, 0.01),
    ],
)
def test_the_default_share_is_small_and_capped(size, documents, share, tmp_path):
    write(tmp_path / "a.txt", "")
    os.truncate(tmp_path / "a.txt", size)  # a hole
    (source,) = find_sources(DataConfig(text=[str(tmp_path)], documents=documents), print)
    assert source.held_out == pytest.approx(share)
    (source,) = find_sources(DataConfig(text=[str(tmp_path)], documents=documents, held_out=0.3), print)
    assert source.held_out == 0.3


def forbidden(function, folder):
    """Deny `function` access to a folder; permissions alone do not bind root."""

    def guarded(path, *arguments, **options):
        if str(path).startswith(str(folder)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return function(path, *arguments, **options)

    return guarded


@pytest.mark.parametrize("name", ["scandir", "stat"])
def test_what_may_not_be_looked_at_is_refused_by_its_name(tree, monkeypatch, name):
    with monkeypatch.context() as patched:
        patched.setattr(os, name, forbidden(getattr(os, name), tree / "deep" / "er"))
        with pytest.raises(InputError, match=r"data\.text: .*deep/er.* cannot be .* \(Permission denied\)"):
            find_files([str(tree)])


@pytest.mark.parametrize("name", ["[ab]", "a*", "a?", "{a}", "a%20#", "ä é", "-a", "file:a"])
def test_a_glob_below_a_folder_of_any_name_matches_what_is_there(tmp_path, name):
    there = write(tmp_path / name / "x.txt")
    write(tmp_path / "ab" / "x.txt")
    assert find_files([str(tmp_path / name / "*.txt")]) == [there]


def test_a_path_with_glob_characters_that_is_there_is_itself(tree):
    write(tree / "odd[1]" / "d.txt")
    assert names(find_files([str(tree / "odd[1]")])) == ["d.txt"]


def test_the_home_directory_is_expanded(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))
    assert find_files(["~/b.txt"]) == [tree / "b.txt"]


def test_doubles_are_removed(tree):
    (tree / "deep" / "same.txt").symlink_to(tree / "b.txt")
    entries = [str(tree / "b.txt"), str(tree), str(tree / "*.txt"), str(tree / "deep" / ".." / "b.txt")]
    assert sorted(names(find_files(entries))) == ["a.md", "b.txt", "c.py"]


def test_the_order_is_that_of_the_entries_and_then_of_the_names(tmp_path):
    for name in ("z.txt", "m.txt", "a.txt", "first.txt"):
        write(tmp_path / "one" / name)
    write(tmp_path / "zero" / "x.txt")
    found = find_files([str(tmp_path / "zero"), str(tmp_path / "one" / "z.txt"), str(tmp_path / "one")])
    assert names(found) == ["x.txt", "z.txt", "a.txt", "first.txt", "m.txt"]


def test_the_standard_library_is_its_sources_without_tests_and_installed_packages():
    found = find_files(["stdlib"])
    root = Path(sysconfig.get_path("stdlib"))
    relative = {path.relative_to(root).as_posix() for path in found}
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= relative
    assert not [name for name in relative if {"test", "site-packages", "__pycache__"} & set(name.split("/"))]
    assert len(found) == len(set(found)) > 400
    assert found == sorted(found) == find_files(["stdlib"])


def test_the_standard_library_behind_a_link_makes_no_doubles(tree, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tree / "deep")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path / "link"))
    assert names(find_files(["stdlib", str(tree / "deep" / "er")])) == ["c.py"]


@pytest.mark.parametrize(
    "entry",
    [
        "deep/picture.png",
        "missing.txt",
        "missing",
        "*.csv",
        "deep/*",
        "empty",
        "a" * 300,
        "~nobody-here/a.txt",
    ],
)
def test_an_entry_without_text_is_refused_by_its_name(tree, monkeypatch, entry):
    (tree / "empty").mkdir()
    monkeypatch.chdir(tree)
    with pytest.raises(InputError) as refused:
        find_files(["b.txt", entry])
    assert "data.text" in str(refused.value) and entry in str(refused.value)
    assert ".txt, .md, .py" in str(refused.value)


def test_each_file_is_one_document_and_empty_ones_are_none(tmp_path):
    contents = {"a.txt": "first\nlines", "b.md": "", "c.py": "x = 1\n"}
    files = [write(tmp_path / name, content) for name, content in contents.items()]
    assert read(*files) == ["first\nlines", "x = 1\n"]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py"])
def test_a_file_that_is_not_utf8_is_named(tmp_path, name):
    path = write(tmp_path / name, b"# fine\n# fine\n# fine\n# caf\xe9\n")
    (broken,) = read(path)
    assert broken.where == str(path) and "UTF-8" in broken.why


def test_a_file_that_vanished_is_named(tmp_path):
    (broken,) = read(tmp_path / "gone.txt")
    assert broken.where == str(tmp_path / "gone.txt") and "cannot be read" in broken.why


def test_python_source_is_read_in_the_encoding_it_declares(tmp_path):
    text = "# -*- coding: latin-1 -*-\n# café\n"
    assert read(write(tmp_path / "a.py", text.encode("latin-1"))) == [text]


@pytest.mark.parametrize("codec", ["no-such-codec", "hex", "undefined"])
def test_python_source_in_an_encoding_that_is_none_is_named(tmp_path, codec):
    path = write(tmp_path / "a.py", f"# coding: {codec}\nx = 1\n")
    (broken,) = read(path)
    assert broken.where == str(path)


def test_a_document_keeps_its_side_when_others_are_added():
    few, many = split(WORDS[:200], 0.3), split(WORDS[::-1], 0.3)
    for side in (0, 1):
        assert few[side] and set(few[side]) < set(many[side])


def test_a_larger_share_only_adds_held_out_documents():
    small, large = split(WORDS, 0.1)[1], split(WORDS, 0.4)[1]
    assert set(small) < set(large)


@pytest.mark.parametrize("held_out", [0.05, 0.3, 0.8])
def test_the_share_is_held_out_within_chance(held_out):
    documents = [f"document {i}" for i in range(10_000)]
    share = len(split(documents, held_out)[1]) / len(documents)
    assert abs(share - held_out) < 5 * np.sqrt(held_out * (1 - held_out) / len(documents))


def test_every_document_is_on_one_side_in_order():
    train, held_out = split(WORDS, 0.3)
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(WORDS)
    assert train == [text for text in WORDS if text in set(train)]


def test_copies_of_a_document_never_straddle_the_split():
    train, held_out = split(WORDS * 3, 0.3)
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("held_out", [0.1, 0.25, 0.5])
def test_a_single_document_is_cut_at_its_end(held_out):
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 1000)))
    (train,), (end,) = split([text], held_out)
    assert train + end == text and len(end) == 1000 * held_out


@pytest.mark.parametrize(
    ("documents", "held_out", "side"),
    [
        (WORDS, 1e-12, "held-out"),
        (WORDS, 1 - 1e-12, "training"),
        (["short"], 0.01, "held-out"),
        (["s"], 0.9, "training"),
    ],
)
def test_a_side_without_text_is_refused(documents, held_out, side, tmp_path):
    for number, text in enumerate(documents):
        write(tmp_path / f"{number}.txt", text)
    (source,) = find_sources(DataConfig(text=str(tmp_path)), lambda line: None)
    count = f"the {len(documents)} document{'s' if len(documents) > 1 else ''} of data.text; give more"
    for given, said in ((True, "data.held_out = .*"), (False, "the default of data.held_out, .*,")):
        refused = source._replace(held_out=held_out, held_out_is_given=given)
        with pytest.raises(InputError, match=f"{said} leaves no {side} text of {count}"):
            scan_source(refused, 0.0, lambda line: None, lambda *_: None)
