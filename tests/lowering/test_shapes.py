"""Array types in XLA's text."""

import pytest

from jaxlm.lowering import shapes


def parsed(text):
    type, end = shapes.parse(text, 0)
    assert end == len(text)
    return type


@pytest.mark.parametrize(
    "text, shown, size",
    [
        ("f32[]", "f32[]", 4),
        ("bf16[1,4096,512]{2,1,0}", "bf16[1,4096,512]", 2 * 4096 * 512),
        ("s4[16]{0}", "s4[16]", 8),
        ("f8e4m3fn[3,5]{1,0}", "f8e4m3fn[3,5]", 15),
        ("pred[4,0]{1,0}", "pred[4,0]", 0),
        ("f32[<=8,2]{1,0}", "f32[8,2]", 64),
        # The two innermost dimensions in memory order are padded to tiles of 8 × 128.
        ("bf16[3,5,100]{2,1,0:T(8,128)(2,1)}", "bf16[3,5,100]", 2 * 3 * 8 * 128),
        ("bf16[3,5,100]{0,1,2:T(8,128)(2,1)}", "bf16[3,5,100]", 2 * 128 * 8 * 100),
        ("f32[300]{0:T(256)}", "f32[300]", 4 * 512),
    ],
)
def test_allocated_bytes(text, shown, size):
    array = parsed(text)
    assert (str(array), array.bytes, array.space) == (shown, size, 0)


def test_memory_space():
    assert parsed("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}").space == 1


def test_tuples_nest():
    type = parsed("((f32[2]{0}, s32[]), (bf16[4]{0}), u32[]{:S(2)})")
    assert [[str(a) for a in shapes.arrays(part)] for part in type] == [["f32[2]", "s32[]"], ["bf16[4]"], ["u32[]"]]


@pytest.mark.parametrize("text", ["x9[2]", "nothing"])
def test_text_without_a_type_is_refused(text):
    with pytest.raises(ValueError):
        shapes.parse(text, 0)
