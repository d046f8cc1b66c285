"""Our reader and writer of safetensors files."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from jaxlm.core.errors import InputError
from jaxlm.families import safetensors
from jaxlm.families.safetensors import LazyTensor, read_header, write

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5).astype(ml_dtypes.bfloat16),
    "scalar": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float16),
    "eight": np.arange(4).astype(ml_dtypes.float8_e4m3fn).reshape(2, 2),
}


def unwritten(arrays):
    return {name: LazyTensor(x.dtype, x.shape, lambda x=x: x) for name, x in arrays.items()}


def test_what_is_written_is_read(tmp_path):
    write(tmp_path / "x.safetensors", unwritten(ARRAYS), {"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name].read(), array)


def test_the_format_s_own_library_reads_it(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    plain = {name: array for name, array in ARRAYS.items() if array.dtype.kind in "fi" and name != "b"}
    plain.pop("eight", None)
    write(tmp_path / "x.safetensors", unwritten(plain), {"format": "pt"})
    for name, array in library.load_file(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(array, plain[name])
    library.save_file({"z": ARRAYS["a"]}, tmp_path / "theirs.safetensors", {"format": "pt"})
    np.testing.assert_array_equal(read_header(tmp_path / "theirs.safetensors")["z"].read(), ARRAYS["a"])


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry()}, 7, "is cut off: 1 bytes of its tensors are missing"),
        ({"a": entry()}, 9, "has more bytes than its tensors: 1"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "b overlaps another tensor, or leaves a gap"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, 20, "b overlaps another tensor, or leaves a gap"),
        ({"a": entry("F32", (3,))}, 8, "a of F32 [3] takes 12 bytes, and its place has 8"),
        ({"a": entry("F4")}, 8, "a has the dtype 'F4', which jaxlm does not read"),
        ({"a": entry(shape=(-2,))}, 8, "a has an impossible shape or place"),
        ({"a": entry(shape=(2**50,))}, 8, "a has an impossible shape or place"),
        ({"a": entry(offsets=(8, 0))}, 8, "a has an impossible shape or place"),
        ({"a": entry(offsets=(0, "8"))}, 8, "a is not described by dtype, shape and data_offsets"),
        ({"a": 5}, 0, "a is not described by dtype, shape and data_offsets"),
        ([1], 0, "has a header that is no table of tensors"),
        ('{"a": 1, "a": 2}', 0, "has a header that is not valid JSON (a name occurs twice)"),
        ("{" * 5000, 0, "has a header that is not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", 0, "has a header that is not valid JSON (a number is too large)"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, header, data, message):
    text = header if isinstance(header, str) else json.dumps(header)
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(data))
    with pytest.raises(InputError) as error:
        read_header(file)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 2**60), struct.pack("<Q", 50) + b"{}"])
def test_a_header_that_cannot_be_is_refused_before_it_is_read(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="is no safetensors file, or is cut off"):
        read_header(tmp_path / "x.safetensors")


def test_shards_are_as_large_as_is_asked_and_no_larger():
    tensors = unwritten({str(n): np.zeros(n, np.int8) for n in (3, 4, 9, 2, 2)} | {"last": np.zeros(1, np.int8)})
    assert [[*shard] for shard in safetensors.shards(tensors, 7)] == [["3", "4"], ["9"], ["2", "last"]]
