"""Times of collectives: the scaling book's worked cases, and invariants of any network."""

import math

import numpy as np
import pytest
from jax._src import mesh_utils

from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.catalog import find
from jaxlm.costs.hardware.network import DIE_TO_DIE_LINKS, KINDS, NETWORK_LATENCY_S, Network
from jaxlm.costs.hardware.target import Target

GB = 1e9
LARGE = 1e12  # bytes, for which latency is negligible


def network(target: str, **mesh: int) -> Network:
    return Network(Target.parse(target), mesh)


def with_link(target: str, **figures) -> Target:
    """A target whose links have other figures."""
    target = Target.parse(target)
    link = target.chip.link.model_copy(update=figures)
    return Target(target.chip.model_copy(update={"link": link}), target.topology)


def refusal(call, *arguments, **named) -> str:
    with pytest.raises(InputError) as refused:
        call(*arguments, **named)
    return str(refused.value)


class TestTheScalingBook:
    """Worked cases of github:jax-ml/scaling-book. Its v5e has 45e9 bytes/s per link, as v4 has here."""

    def test_a_line_of_four(self):
        """sharding.md, pop quiz 2: 34 MB on an axis of 4 of a v5e without wraparound, 3 · 8.4e6 / 4.5e10 = 560 µs."""
        target = with_link("tpu-v5e:4x8", bytes_per_s=4 * 45e9)
        net = Network(target, {"x": 8, "y": 4})
        assert net.describe()["y"] == "4 on x (line)"
        assert net.seconds("all-gather", 2 * 2048 * 8192, "y") == pytest.approx(560e-6, rel=2e-3)
        # Part 2, a shard of 32 kB: three hops of 1 µs.
        assert net.seconds("all-gather", 2 * 256 * 256, "y") == pytest.approx(3e-6)

    def test_a_cube_with_wraparound(self):
        """sharding.md, question 2: V / 9e10 over one axis, V / 1.8e11 over two; the book leaves out (n − 1) / n."""
        net = network("tpu-v4:4x4x4", x=4, y=4, z=4)
        bytes = 2 * 1024 * 4096
        assert net.seconds("all-gather", bytes / 4, "x") == pytest.approx(3 / 4 * 23.3e-6, rel=1e-3)
        assert net.seconds("all-gather", bytes, ("x", "y")) == pytest.approx(15 / 16 * 46.6e-6, rel=1e-3)
        assert net.seconds("all-gather", bytes / 16, "z") == pytest.approx(3 / 4 * 5.83e-6, rel=1e-3)
        # Question 3, 256 bytes: two hops of 1 µs.
        assert net.seconds("all-gather", 256, "x") == pytest.approx(2e-6)

    def test_a_v5e_pod_has_rings_of_sixteen(self):
        net = network("tpu-v5e:16x16", fsdp=16, tensor=16)
        assert net.describe() == {"fsdp": "16 on y (ring)", "tensor": "16 on x (ring)"}
        assert net.seconds("all-gather", GB, "tensor") == pytest.approx(GB * 15 / 16 / 100e9)
        assert net.seconds("all-gather", GB, ("fsdp", "tensor")) == pytest.approx(GB * 255 / 256 / 200e9)

    def test_a_square_without_wraparound_has_one_link_each_way(self):
        net = network("tpu-v5e:4x4", fsdp=16)
        assert net.describe() == {"fsdp": "4 on x (line) × 4 on y (line)"}
        assert net.seconds("reduce-scatter", GB, "fsdp") == pytest.approx(GB * 15 / 16 / 100e9)

    def test_all_to_all_is_a_quarter_of_an_all_gather_on_a_ring(self):
        """sharding.md, "Our final communication primitive": bytes / (4 · W), of all 16 operands together."""
        net = network("tpu-v5e:16x16", fsdp=16, tensor=16)
        assert net.seconds("all-to-all", GB, "tensor") == pytest.approx(16 * GB / (4 * 100e9))

    def test_a_node_of_h100(self):
        """gpus.md, pop quiz 1: bf16[1024, 16384] in 65 µs; question 3 of quiz 2: 536 MB in 1.04 ms."""
        net = network("h100-sxm5:8", tensor=8)
        assert net.seconds("all-gather", 2 * 1024 * 16384, "tensor") == pytest.approx(65e-6, rel=5e-3)
        assert net.seconds("all-gather", 2 * 4096 * 65536, "tensor") == pytest.approx(1.04e-3, rel=5e-3)
        # B (N − 1) / (W N²) of B over all devices.
        assert net.seconds("all-to-all", GB / 8, "tensor") == pytest.approx(GB * 7 / (450e9 * 64))

    def test_two_nodes_are_bound_by_nvlink(self):
        """gpus.md, question 5 of quiz 4: B / 514e9 in the node, B / 800e9 over the network."""
        assert network("h100-sxm5:2x8", fsdp=16).seconds("all-gather", GB, "fsdp") == pytest.approx(GB * 7 / 8 / 450e9)

    def test_many_nodes_are_bound_by_the_network(self):
        """gpus.md, "Cross-node collectives": 413e9 bytes/s over 32 nodes, a little less over 64."""
        net = network("h100-sxm5:32x8", fsdp=256)
        assert net.seconds("reduce-scatter", GB, "fsdp") == pytest.approx(GB / 413e9, rel=1e-3)
        net = network("h100-sxm5:64x8", fsdp=512)
        assert net.describe() == {"fsdp": "8 of 8 in the domain × 64 domains over the network"}
        assert net.seconds("reduce-scatter", GB, "fsdp") == pytest.approx(GB * 63 / 64 / 400e9)

    def test_an_inner_axis_makes_the_outer_one_no_faster_within_a_node(self):
        """gpus.md, pop quiz 3: bytes / Y over a Y-th of the cards."""
        bytes = 2 * 8192 * 32768
        for inner in (1, 2, 4, 8):
            net = network("h100-sxm5:32x8", fsdp=256 // inner, tensor=inner)
            assert net.seconds("all-gather", bytes / inner, "fsdp") == pytest.approx(bytes * 31 / 32 / 400e9)

    def test_all_to_all_over_nodes(self):
        """gpus.md, "Cross-node collectives": B (M − 1) / (M² · W of a node)."""
        net = network("h100-sxm5:4x8", fsdp=32)
        assert net.seconds("all-to-all", GB, "fsdp") == pytest.approx(32 * GB * 3 / (16 * 400e9))


class TestWhereAxesLie:
    @pytest.mark.parametrize(
        ("chip", "physical"),
        [
            ("tpu-v5e", (4, 4)),
            ("tpu-v6e", (8, 16)),
            ("tpu-v5p", (4, 4, 4)),
            ("tpu-v4", (4, 4, 8)),
            ("tpu-v5p", (4, 8, 12)),
            ("tpu-v5p", (16, 4, 4)),
            ("tpu-v7x", (4, 4, 4, 2)),
            ("tpu-v7x", (4, 4, 8, 2)),
        ],
    )
    def test_it_is_as_jax_lays_them_out(self, chip, physical):
        """The members of a group are where JAX puts them, for every mesh of three axes."""
        names = "x y z core".split() if len(physical) == 4 else "xyz"
        devices = np.arange(math.prod(physical)).reshape(physical)
        sizes = [n for n in range(1, devices.size + 1) if devices.size % n == 0]
        meshes = [(d, f, devices.size // (d * f)) for d in sizes for f in sizes if devices.size % (d * f) == 0]
        for mesh in meshes:
            laid, _ = mesh_utils._create_device_mesh_for_nd_torus(devices, mesh, allow_split_physical_axes=True)
            net = Network(Target(find(chip), physical[:3]), dict(zip("dft", mesh, strict=True)))
            for i, axis in enumerate("dft"):
                members = np.unravel_index(np.moveaxis(laid, i, 0)[:, 0, 0], physical)
                spans = {span.dimension.name: span for span in net.spans(axis)}
                for name, places in zip(names, members, strict=False):
                    span = spans.pop(name, None)
                    expected = np.arange(span.size) * span.sharing if span else [0]
                    np.testing.assert_array_equal(np.unique(places), expected, err_msg=f"{mesh} {axis} {name}")
                assert not spans

    def test_parts_of_a_row_share_its_links(self):
        net = network("tpu-v5e:16x16", data=2, fsdp=16, tensor=8)
        assert net.describe() == {
            "data": "2 of 16 on x (ring, links shared by 8)",
            "fsdp": "16 on y (ring)",
            "tensor": "8 of 16 on x (line)",
        }
        assert net.seconds("all-gather", GB, "tensor") == pytest.approx(GB * 7 / 8 / 50e9)
        # Eight pairs lie on each link; together, the two axes are the whole ring.
        assert net.seconds("all-gather", GB, "data") == pytest.approx(GB / 2 / (2 * 50e9 / 8))
        assert net.seconds("all-gather", GB, ("data", "tensor")) == pytest.approx(GB * 15 / 16 / 100e9)

    def test_a_plane_of_a_torus_waits_for_the_links_into_it(self):
        """Pairs that are eight apart on x, two of them adjacent on y: half of the bytes pass four eighths of a link."""
        net = network("tpu-v5e:16x16", a=8, b=4, c=8)
        assert net.describe()["b"] == "2 of 16 on x (ring, links shared by 8) × 2 of 16 on y (line)"
        assert net.seconds("all-gather", GB, "b") == pytest.approx(GB / 2 / (4 / 8 * 50e9))

    def test_members_may_lie_to_both_sides_of_strangers(self):
        net = network("tpu-v5e:4x4", a=2, b=4, c=2)
        assert net.describe() == {
            "a": "2 of 4 on x (line, links shared by 2)",
            "b": "4 on y (line)",
            "c": "2 of 4 on x (line)",
        }
        (span,) = [s for s in network("tpu-v5e:8x8", a=2, b=2, c=16).spans(("a", "c")) if s.sharing > 1]
        assert (span.dimension.name, span.size, span.sharing) == ("y", 4, 2)

    def test_outer_axes_go_over_the_network_first(self):
        net = network("h100-sxm5:64x8", data=2, fsdp=64, tensor=4)
        assert net.describe() == {
            "data": "2 domains over the network",
            "fsdp": "2 of 8 in the domain × 32 domains over the network",
            "tensor": "4 of 8 in the domain",
        }

    def test_an_inner_axis_over_the_network_is_slow(self):
        inside = network("h100-sxm5:2x8", fsdp=2, tensor=8).seconds("all-to-all", GB, "tensor")
        assert network("h100-sxm5:2x8", tensor=16).seconds("all-to-all", GB, "tensor") > 5 * inside

    def test_an_exchange_in_the_domain_is_of_what_stays_there(self):
        """A quarter of it, where eight of 32 are in the domain and the network takes no time."""
        chip = find("h100-sxm5").model_copy(update={"scale_out_bytes_per_s": 1e15})
        net = Network(Target(chip, (4, 8)), {"fsdp": 32})
        assert net.seconds("all-to-all", GB, "fsdp") == pytest.approx(GB / 4 * 7 / 8 / 450e9)

    def test_two_cores_of_a_chip_share_its_links(self):
        net = network("tpu-v7x:4x4x4", fsdp=64, tensor=2)
        assert net.describe()["tensor"] == "2 cores of a chip"
        assert net.seconds("all-gather", GB, "tensor") == pytest.approx(GB / 2 / (DIE_TO_DIE_LINKS * 100e9))
        # 64 chips gather on each of the two cores, or once for both.
        assert net.seconds("all-gather", GB, "fsdp") == pytest.approx(2 * GB * 63 / 64 / 600e9)
        assert net.seconds("all-gather", GB, ("fsdp", "tensor")) == pytest.approx(GB * 63 / 64 / 600e9)
        # JAX gives the inner axis of small slices the cores.
        assert network("tpu-v7x:2x2x1", fsdp=4, tensor=2).describe()["tensor"] == "2 cores of a chip"

    def test_links_between_all_pairs(self):
        """A group of two uses one of seven links."""
        net = network("mi300x:8", fsdp=4, tensor=2)
        assert net.seconds("all-gather", GB, "tensor") == pytest.approx(GB / 2 / 64e9)
        assert network("mi300x:8", fsdp=8).seconds("all-gather", GB, "fsdp") == pytest.approx(GB * 7 / 8 / 448e9)

    def test_a_torus_of_another_kind_is_squarest(self):
        net = network("trainium1:16", fsdp=4, tensor=4)
        assert net.describe() == {"fsdp": "4 on y (ring)", "tensor": "4 on x (ring)"}
        assert network("inferentia2:12", fsdp=12).describe() == {"fsdp": "12 on x (ring)"}
        assert network("inferentia2:6", fsdp=6).describe() == {"fsdp": "6 on x (line)"}


MACHINES = (
    "tpu-v5e:4x4",
    "tpu-v5e:16x16",
    "tpu-v5p:4x4x4",
    "tpu-v7x:4x4x4",
    "h100-sxm5:4x8",
    "gb200-nvl72:2x72",
    "mi300x:8",
)


@pytest.mark.parametrize("target", MACHINES)
class TestAnyNetwork:
    @pytest.fixture
    def net(self, target) -> Network:
        devices = Target.parse(target).devices
        return network(target, data=2, fsdp=devices // 4, tensor=2)

    @pytest.fixture(
        params=[("data",), ("fsdp",), ("tensor",), ("data", "fsdp"), ("data", "tensor"), ("data", "fsdp", "tensor")]
    )
    def axes(self, request):
        return request.param

    @pytest.mark.parametrize("kind", KINDS)
    def test_more_bytes_are_never_faster(self, net, axes, kind):
        times = [net.seconds(kind, bytes, axes) for bytes in (0, 1, 1e3, 1e6, 1e9, 1e12)]
        assert times == sorted(times) and times[-1] > times[0]
        assert net.seconds(kind, 2 * LARGE, axes) == pytest.approx(2 * net.seconds(kind, LARGE, axes))

    def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(self, net, axes):
        for bytes in (1, GB):
            parts = net.seconds("reduce-scatter", bytes, axes) + net.seconds("all-gather", bytes, axes)
            assert net.seconds("all-reduce", bytes, axes) == pytest.approx(parts)

    def test_no_device_receives_faster_than_all_its_links(self, net, axes):
        """A member receives the bytes that it lacks over every link of its chip, inside it and to the network too."""
        chip, n = net.target.chip, math.prod(net.mesh[axis] for axis in axes)
        links = 2 * chip.link.bytes_per_s + chip.scale_out_bytes_per_s
        assert net.seconds("all-gather", GB, axes) >= GB * (n - 1) / n / links

    def test_an_exchange_is_no_slower_than_gathering_everything(self, net, axes):
        n = math.prod(net.mesh[axis] for axis in axes)
        assert net.seconds("all-to-all", GB, axes) <= net.seconds("all-gather", n * GB, axes) * (1 + 1e-9)

    def test_the_order_of_axes_is_no_matter(self, net, axes):
        assert net.seconds("all-gather", GB, axes[::-1]) == net.seconds("all-gather", GB, set(axes))

    def test_a_group_of_one_takes_no_time(self, target):
        net = network(target, data=1, fsdp=Target.parse(target).devices, tensor=1)
        assert all(net.seconds(kind, GB, ("data", "tensor")) == 0 for kind in KINDS)
        assert all(net.seconds(kind, GB, ()) == 0 for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bytes", [1, 1e6, 1e9])
def test_wraparound_is_never_slower(kind, bytes):
    for topology in ("tpu-v5e:4x4", "tpu-v5e:8x16", "tpu-v5e:16x16"):
        open, joined = with_link(topology, wraparound=None), with_link(topology, wraparound=2)
        for tensor in (1, 2, 4, 8):
            mesh = {"data": 2, "fsdp": open.devices // (2 * tensor), "tensor": tensor}
            for axes in ("data", "fsdp", "tensor", tuple(mesh)):
                assert Network(joined, mesh).seconds(kind, bytes, axes) <= Network(open, mesh).seconds(
                    kind, bytes, axes
                )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "all-to-all"])
def test_more_nodes_are_never_faster(kind):
    for bytes in (1, GB):
        times = [network(f"h100-sxm5:{n}x8", fsdp=8 * n).seconds(kind, bytes, "fsdp") for n in (1, 2, 3, 4, 16, 64)]
        assert times == sorted(times)


def test_small_arrays_wait_for_the_way():
    assert network("tpu-v5e:4x4", fsdp=16).seconds("all-gather", 1, "fsdp") == pytest.approx(6e-6)
    assert network("tpu-v5e:16x16", fsdp=256).seconds("all-gather", 1, "fsdp") == pytest.approx(16e-6)
    assert network("tpu-v5e:16x16", fsdp=256).seconds("all-reduce", 1, "fsdp") == pytest.approx(32e-6)
    # Members that are eight chips apart are eight hops apart.
    net = network("tpu-v5e:16x16", data=2, fsdp=16, tensor=8)
    assert net.seconds("all-gather", 1, "data") == pytest.approx(8e-6)
    # Through a switch it is one hop; between 8 domains, three steps of a tree.
    assert network("h100-sxm5:8", fsdp=8).seconds("all-gather", 1, "fsdp") == pytest.approx(10e-6)
    times = network("h100-sxm5:8x8", fsdp=64).seconds("all-gather", 1, "fsdp")
    assert times == pytest.approx(10e-6 + 3 * NETWORK_LATENCY_S)
    # An unpublished latency counts as zero.
    assert network("h800-sxm5:8", fsdp=8).seconds("all-gather", 0, "fsdp") == 0


def test_a_neighbour_is_one_hop_away_but_around_an_open_row():
    ring = network("tpu-v5e:16x16", fsdp=16, tensor=16)
    assert ring.seconds("collective-permute", GB, "tensor") == pytest.approx(GB / 50e9)
    assert ring.seconds("collective-permute", 1, "tensor") == pytest.approx(1e-6)
    assert network("tpu-v5e:4x4", fsdp=4, tensor=4).seconds("collective-permute", 1, "fsdp") == pytest.approx(3e-6)
    assert network("h100-sxm5:2x8", fsdp=16).seconds("collective-permute", GB, "fsdp") == pytest.approx(GB / 50e9)


class TestBadInput:
    def test_a_mesh_of_other_devices(self):
        message = refusal(network, "h100-sxm5:8", data=2, fsdp=4, tensor=2)
        assert message == "a mesh of data=2 × fsdp=4 × tensor=2 has 16 devices; h100-sxm5:8 has 8 of them"
        assert "tpu-v7x:2x2x1 has 8" in refusal(network, "tpu-v7x:2x2x1", fsdp=4)
        assert "at least one device" in refusal(network, "h100-sxm5:8", fsdp=-8, tensor=-1)

    def test_unknown_axes_and_kinds(self):
        net = network("h100-sxm5:8", fsdp=4, tensor=2)
        assert refusal(net.seconds, "all-gather", GB, "model") == "the mesh has no axis model; it has fsdp, tensor"
        assert "the kinds are all-gather" in refusal(net.seconds, "gather", GB, "fsdp")

    def test_rates_that_are_not_published(self):
        net = Network(with_link("h100-sxm5:8", bytes_per_s=None), {"fsdp": 8})
        assert "h100-sxm5 has no published link.bytes_per_s;" in refusal(net.seconds, "all-gather", GB, "fsdp")
        chip = find("h100-sxm5").model_copy(update={"scale_out_bytes_per_s": None})
        net = Network(Target(chip, (2, 8)), {"fsdp": 2, "tensor": 8})
        assert "no published scale_out_bytes_per_s;" in refusal(net.seconds, "all-gather", GB, "fsdp")
        assert net.seconds("all-gather", GB, "tensor") > 0

    def test_one_chip_needs_no_link(self):
        net = network("apple-m1", data=1, fsdp=1, tensor=1)
        assert net.seconds("all-reduce", GB, ("data", "fsdp")) == 0
        assert net.describe() == {"data": "1 device", "fsdp": "1 device", "tensor": "1 device"}
