"""Figures read from a TPU's schedule; the kernels themselves are tested in tests/kernels."""

import pytest

from jaxlm.lowering import bundles
from jaxlm.lowering.bundles import ScheduledKernel

UTILIZATION = """== CAPACTIY:
MXU, VALU, VSTORE
    2     4     1
== UTILIZATION:
0 0 0
0 4 0
2 4 0
1 2 1
0 2 1
0 0 1
"""
LISTING = """
= control target key start
LB: loop body
PF: predicated region fallthrough
= control target key end

     0   :  { %s1 = smov 0 }
   0x1   :  { %2 = sbr.rel (%p1) target = $region4 }
   0x2 LB: > { %v3 = vmatmul.f32 %v1 }
   0x3   : > { %v4 = vadd.f32 %v3, %v2  ;;  %5 = vst [vmem:[#allocation1]] %v4 }
   0x4   : > { %6 = vst [vmem:[#allocation1]] %v4 }
   0x5 PF: > { %7 = vst [vmem:[#allocation2]] %v4 }
"""


def _write(folder, program, number, utilization=UTILIZATION, listing=LISTING):
    begin = f"{1795327180795558595 + number}-{program}"
    (folder / f"{begin}-01-final_hlo-static-per-bundle-utilization.txt").write_text(utilization)
    (folder / f"{begin}-02-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:")
    (folder / f"{begin}-03-final_bundles.txt").write_text(listing)
    (folder / f"{begin}-hlo.txt").write_text("HloModule")


def test_the_longest_run_lies_between_branches_and_jump_targets(tmp_path):
    _write(tmp_path, "kernel.1", 2)
    _write(tmp_path, "<late-initialization>", 1)
    before, kernel = bundles.read(tmp_path)
    assert before.name == "<late-initialization>"
    assert kernel == ScheduledKernel("kernel", 6, 3, {"MXU": 0.5, "VALU": 0.6667, "VSTORE": 0.6667})


def test_a_kernel_without_a_branch_is_one_run(tmp_path):
    _write(tmp_path, "kernel", 1, listing="\n".join(f"   {i:#x}   :  {{ %v = vadd }}" for i in range(6)))
    (kernel,) = bundles.read(tmp_path)
    assert kernel.longest == kernel.bundles == 6 and kernel.busy["VALU"] == 0.5


def test_libtpu_is_told_where_to_write(tmp_path):
    (flags,) = bundles.environment(tmp_path).values()
    assert f"--xla_jf_dump_to={tmp_path} " in flags and "final_bundles" in flags


@pytest.mark.parametrize("missing", ["-03-final_bundles.txt"])
def test_half_of_a_schedule_is_an_error(tmp_path, missing):
    _write(tmp_path, "kernel", 1)
    next(tmp_path.glob(f"*{missing}")).unlink()
    with pytest.raises(ValueError):
        list(bundles.read(tmp_path))
