"""Layers that differ: the blocks of a pattern, and what is refused of one."""

import pytest
from config_fixtures import SMALL, refusal, write

from jaxlm.config import load
from jaxlm.config.mesh_layout import divided_by_mesh
from jaxlm.core.errors import InputError


def model(*overrides):
    return load(SMALL, overrides).model


def pattern(*entries):
    return f"model.pattern=[{', '.join(entries)}]"


def test_without_a_pattern_all_layers_are_the_model_s_block():
    plain = model()
    assert plain.layer_names == ("layers",) * 4
    assert {id(block) for block in plain.layers} == {id(plain.layers[0])}
    assert plain.layers[0].attention == plain.attention


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        (["{name='a'}", "{name='b'}"], "abab"),
        (["{name='a', layers=2}", "{name='b'}"], "aaba"),
        (["{name='a'}", "{name='b', layers='rest'}"], "abbb"),
        (["{name='a', layers='rest'}"], "aaaa"),
        (["{name='a', layers=3}", "{name='b'}"], "aaab"),
    ],
)
def test_a_pattern_is_repeated_unless_its_last_entry_takes_the_rest(entries, names):
    assert "".join(model(pattern(*entries)).layer_names) == names


def test_a_patch_is_merged_into_the_model_s_block():
    scaled = "model.position.scaling={factor=4.0, original_context_length=128}"
    found = model(
        scaled,
        pattern(
            "{name='a', attention={window=8}, position={theta=5.0}}", "{name='b', norm={kind='layer'}}", "{name='c'}"
        ),
    )
    a, b, c, again = found.layers
    assert (a.attention.window, b.attention.window) == (8, None) and a.attention.num_heads == found.attention.num_heads
    assert a.position.theta == 5.0 and a.position.scaling == c.position.scaling is not None
    assert b.norm.kind == "layer" and b.norm.bias and c.norm == found.norm  # of another kind no key is left
    assert a is again and c == model(scaled).layers[0]


def test_equal_blocks_of_two_entries_are_one_object():
    a, b, *_ = model(pattern("{name='a', attention={window=8}}", "{name='b', attention={window=8}}")).layers
    assert a is b


def test_defaults_of_heads_follow_an_entry_s_own_heads(tmp_path):
    """They are filled in after the merge, but where the model gives them, and stay as they are in a resolved file."""
    heads, two = "model.attention={num_heads=8}", pattern("{name='a', attention={num_heads=2}}", "{name='b'}")
    experiment = load(SMALL, [heads, two])
    a, b, *_ = experiment.model.layers
    assert (a.attention.num_kv_heads, a.attention.head_dim) == (2, 128)
    assert (b.attention.num_kv_heads, b.attention.head_dim) == (8, 32)
    assert load(write(tmp_path / "config.toml", experiment.to_toml())) == experiment
    given = model("model.attention={num_heads=8, num_kv_heads=1, head_dim=16}", two).layers[0].attention
    assert (given.num_kv_heads, given.head_dim) == (1, 16)


def test_overrides_of_the_model_s_keys_reach_all_layers_of_a_resolved_file(tmp_path):
    file = write(
        tmp_path / "config.toml", load(SMALL, [pattern("{name='a', attention={window=8}}", "{name='b'}")]).to_toml()
    )
    assert [block.feed_forward.d_ff for block in load(file, ["model.feed_forward.d_ff=24"]).model.layers] == [24] * 4
    assert load(file, ["model.pattern=[]"]).model == load(SMALL).model


def test_a_copy_has_the_layers_of_its_own_keys():
    found = model(pattern("{name='a', attention={window=8}}", "{name='b'}"))
    assert len(found.layers) == 4 and len(found.model_copy(update={"num_layers": 2}).layers) == 2
    assert {block.attention.window for block in found.of(found.layers[0]).layers} == {8}


def test_a_mesh_divides_the_sizes_of_every_entry():
    found = model(pattern("{name='a', feed_forward={d_ff=36}}", "{name='b'}"))
    sizes = {each.key: each.size for each in divided_by_mesh(found)}
    assert sizes["model.pattern[0].feed_forward.d_ff"] == 36
    assert sizes["model.feed_forward.d_ff"] == found.feed_forward.d_ff
    said = refusal(pattern("{name='a', feed_forward={d_ff=37}}", "{name='b'}"), "mesh.tensor=2")
    assert "mesh.tensor = 2 does not divide model.pattern[0].feed_forward.d_ff = 37" in said and "d_ff to 38" in said


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["{name='a', layers=0}"], ["model.pattern[0].layers = 0"]),
        (["{name='A b'}"], ["model.pattern[0].name = 'A b'"]),
        (["{layers=2}"], ["model.pattern[0].name is missing"]),
        (["{name='a'}", "{name='a'}"], ["model.pattern[1].name = 'a' is the name of model.pattern[0] too"]),
        (["{name='a', layers='rest'}", "{name='b'}"], ["model.pattern[0].layers = 'rest'", "move it last"]),
        (["{name='a', layers=3}", "{name='b', layers=2}"], ["model.pattern has 5 layers", "model.num_layers = 4"]),
        (["{name='a', layers=4}", "{name='b', layers='rest'}"], ["model.pattern[1] is left no layers"]),
        (["{name='a', attention={num_head=2}}"], ["unknown key model.pattern[0].attention.num_head", "num_heads?"]),
        (
            ["{name='a', atention={}}"],
            ["unknown key model.pattern[0].atention", "did you mean model.pattern[0].attention?"],
        ),
        (["{name='a'}", "{name='b', feed_forward={d_ff=-1}}"], ["model.pattern[1].feed_forward.d_ff = -1"]),
        (["{name='a', norm={kind='group'}}"], ["model.pattern[0].norm.kind = 'group'"]),
        (["{name='a', attention={num_kv_heads=3}}"], ["model.pattern[0].attention.num_kv_heads = 3 does not divide"]),
        (["{name='a', attention={num_heads=3}}"], ["model.pattern[0].attention.num_heads = 3", "model.d_model"]),
        (["{name='a', attention={head_dim=5}}"], ["model.pattern[0].attention.head_dim = 5: it must be even"]),
        (["{name='a', position={kind='learned'}}"], ["model.pattern[0].position.kind = 'learned'", "whole model"]),
        (["{name='a', attention=3}"], ["model.pattern[0].attention must be a section"]),
        (
            ["{name='a', attention={window={size=8, global_every=2}}}"],
            ["model.pattern[0].attention.window.size is now"],
        ),
        (["3"], ["model.pattern[0] must be a section"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_a_pattern_that_says_nothing_sound_is_refused(entries, said):
    line = refusal(pattern(*entries))
    assert not [part for part in said if part not in line] and "\n" not in line, line


def test_learned_positions_belong_to_the_whole_model():
    said = refusal("model.position={kind='learned'}", pattern("{name='a', position={kind='none'}}", "{name='b'}"))
    assert "model.pattern[0].position.kind = 'none', and model.position.kind = 'learned'" in said


def test_gates_are_kept_where_any_layer_has_one():
    gated = pattern("{name='a', feed_forward={gated=true}}", "{name='b'}")
    keep = "execution.remat=['gate']"
    assert model("model.feed_forward.gated=false", gated, keep).layers[0].feed_forward.gated
    with pytest.raises(InputError, match="keeps gate, which no layer of the model has"):
        load(SMALL, ["model.feed_forward.gated=false", keep])
