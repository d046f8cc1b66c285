"""Text on disk: which files a configuration means, and the documents in them."""

import glob
import hashlib
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxlm.data.config import STANDARD_LIBRARY
from jaxlm.errors import InputError

SUFFIXES = (".txt", ".md", ".py")
_KINDS = ", ".join(SUFFIXES)
# In the standard library's folder, but not its sources: installed packages, build outputs, and the tests,
# which are larger than everything else together.
_NOT_STANDARD_LIBRARY = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload", "ensurepip",
}  # fmt: skip


def find_files(text: Iterable[str]) -> list[Path]:
    """The files that `data.text` means, without doubles, in an order that does not depend on the file system.

    Raises InputError for an entry that names nothing, or nothing that is text.
    """
    found: dict[Path, None] = {}
    for entry in text:
        found.update(dict.fromkeys(_find(entry)))
    return list(found)


def _find(entry: str) -> list[Path]:
    if entry == STANDARD_LIBRARY:
        return _standard_library()
    try:
        path = Path(entry).expanduser()
        is_file, is_dir = path.is_file(), path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a user who is not, a null byte
        raise InputError(f"data.text: {entry} is no name of {_KINDS} files ({error})") from None
    if is_file:
        if path.suffix not in SUFFIXES:
            raise InputError(f"data.text: {entry} is not text; give {_KINDS} files")
        return [path.resolve()]
    if is_dir:
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not files:
            raise InputError(f"data.text: no {_KINDS} files under {entry}")
        return [p.resolve() for p in files]
    matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
    files = [p for p in matches if p.suffix in SUFFIXES and p.is_file()]
    if not files:
        raise InputError(f"data.text: {entry} is no file, directory or glob of {_KINDS} files here")
    return [p.resolve() for p in files]


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    files = (p for p in root.rglob("*.py") if not _NOT_STANDARD_LIBRARY.intersection(p.relative_to(root).parts))
    return sorted(p.resolve() for p in files)


def read_documents(files: Iterable[Path]) -> Iterator[str]:
    """The text of each file that is not empty; one file is one document.

    Text is UTF-8, Python source as it declares itself. Raises InputError naming a file that is neither.
    """
    for path in files:
        try:
            if path.suffix == ".py":
                with tokenize.open(path) as source:
                    text = source.read()
            else:
                text = path.read_text(encoding="utf-8-sig")
        except (UnicodeError, SyntaxError, LookupError) as error:
            raise InputError(f"data.text: {path} is not UTF-8 text ({error})") from error
        except OSError as error:
            raise InputError(f"data.text: {path} cannot be read ({error.strerror})") from error
        if text:
            yield text


def split(documents: list[str], held_out: float) -> tuple[list[str], list[str]]:
    """(training, held-out) documents.

    Each document falls by a hash of its content, so that adding files moves none; a single one is cut, and its
    end held out. Raises InputError where one side would be empty.
    """
    if len(documents) == 1:
        text = documents[0]
        cut = round(len(text) * (1.0 - held_out))
        sides = [text[:cut]], [text[cut:]]
    else:
        sides = [], []
        for text in documents:
            share = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
            sides[share < held_out].append(text)
    if not any(sides[0]) or not any(sides[1]):
        side = "training" if not any(sides[0]) else "held-out"
        raise InputError(
            f"data.held_out = {held_out} leaves no {side} text of {len(documents)} documents; "
            "give more text or change it"
        )
    return sides
