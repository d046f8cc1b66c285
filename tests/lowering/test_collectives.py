"""Device groups of collectives in every syntax that XLA prints, and the mesh axes that they cross."""

import numpy as np
import pytest

from jaxlm.lowering import collectives, hlo

MESH = {"data": 2, "fsdp": 2, "tensor": 4}
DEVICES = np.arange(16).reshape(2, 2, 4)


def instruction(groups: str) -> hlo.HloInstruction:
    text = f"""HloModule m
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %y = f32[8]{{0}} all-reduce(%x), channel_id=1, {groups}, use_global_device_ids=true
}}
"""
    return hlo.parse(text).entry.instructions["y"]


def along(*axes: str) -> list[list[int]]:
    """Return the device groups along these axes."""
    kept = [i for i, axis in enumerate(MESH) if axis not in axes]
    grouped = [i for i, axis in enumerate(MESH) if axis in axes]
    return DEVICES.transpose(kept + grouped).reshape(-1, np.prod([DEVICES.shape[i] for i in grouped])).tolist()


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}", ("tensor",)),
        ("replica_groups=[8,2]<=[2,8]T(1,0)", ("data",)),
        ("replica_groups=[2,8]<=[16]", ("fsdp", "tensor")),
        ("replica_groups=[4,4]<=[2,2,4]T(2,0,1)", ("data", "fsdp")),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2,'axis_2'=4] {'axis_1'}", ("fsdp",)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2,'axis_2'=4] {'axis_0','axis_2'}", ("data", "tensor")),
        ("replica_groups=mesh['axis_0'=8,'axis_1'=1,'axis_2'=2], device_ids=([2,2,4]T(0,2,1)) {'axis_0'}",
         ("data", "tensor")),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=4] {'axis_0':(1)2}", ("data",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=4] {'axis_0':(2)2}", ("fsdp",)),
        ("replica_groups={}", ("data", "fsdp", "tensor")),
    ],
)  # fmt: skip
def test_groups_and_axes(groups, axes):
    found = collectives.groups(instruction(groups), 16)
    assert sorted(sorted(group) for group in found.tolist()) == sorted(sorted(group) for group in along(*axes))
    assert collectives.axes_of(found, MESH) == (axes, True)


def test_a_part_of_an_axis_is_said():
    found = collectives.groups(instruction("replica_groups=[8,2]<=[16]"), 16)
    assert collectives.axes_of(found, MESH) == (("tensor",), False)


@pytest.mark.parametrize(
    "axes, by, is_neighbour", [(("tensor",), 1, True), (("tensor",), -1, True), (("tensor",), 2, False),
                               (("fsdp",), 1, True), (("data", "fsdp"), 1, True), (("data", "fsdp"), 2, False)]
)  # fmt: skip
def test_a_permutation_by_one_place_along_axes_is_told_from_others(axes, by, is_neighbour):
    pairs = [(one, other) for group in along(*axes) for one, other in zip(group, np.roll(group, -by), strict=True)]
    listed = ",".join(f"{{{one},{other}}}" for one, other in pairs)
    found = collectives.groups(instruction(f"source_target_pairs={{{listed}}}"), 16)
    assert collectives.goes_one_place(found, axes, MESH) == is_neighbour


def test_an_unknown_syntax_is_not_guessed():
    with pytest.raises(ValueError, match="unknown syntax"):
        collectives.groups(instruction("replica_groups=<everybody>"), 16)


def test_loops_multiply_and_identical_collectives_are_summed():
    text = """HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
%body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[], f32[64]{0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = f32[64]{0} get-tuple-element(%p), index=1
  %part = f32[4]{0} reduce-scatter(%x), replica_groups=[1,16]<=[16], to_apply=%add, metadata={op_name="jit(f)/first"}
  %gathered = (f32[4]{0}, f32[64]{0}) all-gather-start(%part), replica_groups=[1,16]<=[16], dimensions={0}
  %whole = f32[64]{0} all-gather-done(%gathered)
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  ROOT %t = (s32[], f32[64]{0}) tuple(%next, %whole)
}
%condition (p: (s32[], f32[64])) -> pred[] {
  %p = (s32[], f32[64]{0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %trips = s32[] constant(5)
  ROOT %less = pred[] compare(%n, %trips), direction=LT
}
ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], f32[64]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[64]{0}) while(%t), condition=%condition, body=%body
  %y = f32[64]{0} get-tuple-element(%loop), index=1
  ROOT %sum = f32[64]{0} all-reduce(%y), replica_groups=[1,16]<=[16], to_apply=%add
}
"""
    rows = collectives.table(collectives.collectives(hlo.parse(text), MESH))
    assert {(row.kind, row.count, row.bytes, row.in_loop, row.scope) for row in rows} == {
        ("reduce-scatter", 5, 256, True, "first"),
        ("all-gather", 5, 256, True, ""),
        ("all-reduce", 1, 256, False, ""),
    }


def test_an_overlapped_gather_of_a_tpu_runs_once_for_each_start():
    """It is printed again in each product that it runs beside, those of a loop between its start and its end too."""
    part = (
        "all-gather(%{}), channel_id=1, replica_groups=[1,16]<=[16], dimensions={{0}}, "
        'frontend_attributes={{chain_id="0"}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}'
    )
    text = f"""HloModule m
%start (x: f32[4]) -> (f32[4], f32[64]) {{
  %x = f32[4]{{0}} parameter(0)
  %gathered = f32[64]{{0}} {part.format("x")}
  ROOT %started = (f32[4]{{0}}, f32[64]{{0}}) custom-call(%gathered), custom_call_target="AsyncCollectiveStart"
}}
%beside (y: f32[4]) -> f32[64] {{
  %y = f32[4]{{0}} parameter(0)
  ROOT %gathered.1 = f32[64]{{0}} {part.format("y")}
}}
%done (z: f32[4]) -> f32[64] {{
  %z = f32[4]{{0}} parameter(0)
  %gathered.2 = f32[64]{{0}} {part.format("z")}
  ROOT %whole = f32[64]{{0}} custom-call(%gathered.2), custom_call_target="AsyncCollectiveDone"
}}
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %w = f32[4]{{0}} get-tuple-element(%p), index=1
  %product = f32[64]{{0}} fusion(%w), kind=kOutput, calls=%beside
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  ROOT %t = (s32[], f32[4]{{0}}) tuple(%next, %w)
}}
%condition (p: (s32[], f32[4])) -> pred[] {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %trips = s32[] constant(5)
  ROOT %less = pred[] compare(%n, %trips), direction=LT
}}
ENTRY %main (v: f32[4]) -> f32[64] {{
  %v = f32[4]{{0}} parameter(0)
  %begun = (f32[4]{{0}}, f32[64]{{0}}) fusion(%v), kind=kCustom, calls=%start
  %zero = s32[] constant(0)
  %t = (s32[], f32[4]{{0}}) tuple(%zero, %v)
  %loop = (s32[], f32[4]{{0}}) while(%t), condition=%condition, body=%body
  ROOT %end = f32[64]{{0}} fusion(%v), kind=kCustom, calls=%done
}}
"""
    (gather,) = collectives.collectives(hlo.parse(text), MESH)
    assert (gather.kind, gather.axes, gather.count, gather.bytes) == ("all-gather", tuple(MESH), 1, 256)
