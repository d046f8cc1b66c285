"""The published family that is nearest to a model of none, and the keys in which the model differs."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from jaxlm.core.schema import Change, Section, changes, kind_of, leaves, shown
from jaxlm.families.family import Family
from jaxlm.families.rule import named_kinds
from jaxlm.models.block_config import BlockConfig
from jaxlm.models.config import ModelConfig
from jaxlm.models.layer_config import LayerConfig

_NAMED = 3  # keys in a message, at most


def why_of_none(model: ModelConfig, tried: Iterable[tuple[Family, ModelConfig | str]]) -> str:
    """Return the end of a message that says why a model is of no family: the kind of a part of a plug-in, kinds of
    attention that no family has together, or else the nearest family and the first keys in which the model differs
    from it.

    Args:
      tried: each family, with the model that its config.json for this model describes, or with why it has none.
    """
    for name, part in model:
        if isinstance(part, Section) and not type(part).__module__.startswith("jaxlm."):
            return f"model.{name}.kind = {kind_of(type(part))!r} is in no family"
    tried = list(tried)
    kinds = dict.fromkeys(block.attention.kind for block in model.layers if block.attention.kind != "none")
    tried = [each for each in tried if kinds.keys() <= _kinds(each[0])]
    if not tried:
        return f"no family has layers with model.attention.kind = {' and others with '.join(kinds)}"
    ranked = [(family, *_differences(model, family, outcome)) for family, outcome in tried]
    family, differences, why = min(ranked, key=lambda each: _distance(each[1], each[2]))
    if not differences:
        return f"it is not of the nearest family, {family.name}: {why}"
    keys = [f"model.{key} = {shown(now)} and not {shown(published)}" for key, published, now in differences]
    more = f" and {len(keys) - _NAMED} more keys" if len(keys) > _NAMED else ""
    alone = _alone(model, differences, [each for each, *_ in ranked])
    return f"it differs from the nearest family, {family.name}, in {', '.join(keys[:_NAMED])}{more}{alone}"


def _kinds(family: Family) -> set[str]:
    """Return the kinds of attention that layers of a family have."""
    return {family.model.get("attention", {}).get("kind", "gqa"), *named_kinds(family.rules)}


def computed(block: BlockConfig) -> dict[str, Any]:
    """Return the keys of a block that inference reads, with the scale of scores that grouped-query attention takes."""
    parts: dict[str, Any] = {name: part.training_keys for name, part in block if isinstance(part, LayerConfig)}
    unread: dict[str, Any] = {name: set(keys) for name, keys in parts.items() if keys}
    if block.attention.rotated is None and block.position.kind != "learned":
        unread["position"] = True  # nothing rotates
    keys = block.model_dump(exclude=unread)
    attention = keys["attention"]
    if "head_dim" in attention and attention.get("scale", 1.0) is None:
        attention["scale"] = attention["head_dim"] ** -0.5
    return keys


def _differences(model: ModelConfig, family: Family, outcome: ModelConfig | str) -> tuple[list[Change], str]:
    """Return the keys in which a model differs from a family, and why it has no config.json there; "" if it has one.

    Where it has none, the keys are those whose values all models of the family share.
    """
    if isinstance(outcome, str):
        return list(_from_shared(family.model, model)), outcome
    in_blocks = BlockConfig.model_fields.keys() | {"pattern", "initializer_std"}
    pairs = zip(outcome.layers, model.layers, strict=True)
    of_layers = (changes(computed(published), computed(block)) for published, block in pairs)
    rest = changes(outcome.model_dump(exclude=in_blocks), model.model_dump(exclude=in_blocks))
    return list({str(each): each for each in chain(*of_layers, rest)}.values()), ""


def _from_shared(shared: Mapping[str, Any], model: ModelConfig) -> Iterable[Change]:
    """Yield the keys of [model] that a family shares and that no layer of a model has with the family's value."""
    blocks = [computed(block) for block in dict.fromkeys(model.layers)]
    for part, table in shared.items():
        if not isinstance(table, Mapping):
            if getattr(model, part) != table:
                yield Change(part, table, getattr(model, part))
            continue
        tables = [block[part] for block in blocks if part in block]
        if not tables:
            continue  # positions, where nothing rotates
        kinds = [each for each in tables if each.get("kind") == table.get("kind")]
        # Families of mixtures have dense layers beside them; others have no mixtures.
        others = [each for each in tables if each.get("kind") == "mixture"] if table.get("kind") == "dense" else []
        if "kind" in table and (others or not kinds):
            yield Change(f"{part}.kind", table["kind"], (others or tables)[0]["kind"])
            continue
        of_kind = dict(leaves((kinds or tables)[0]))
        for key, value in leaves(table):
            if key in of_kind and of_kind[key] != value:
                yield Change(f"{part}.{key}", value, of_kind[key])


def _distance(differences: list[Change], why: str) -> tuple[int, ...]:
    """Return what orders families: other attention, then kinds of other parts, then the number of keys, of which not
    all are known where there is no config.json."""
    kinds = [change.key for change in differences if change.key.endswith("kind")]
    return "attention.kind" in kinds, len(kinds), len(differences) + bool(why), bool(why)


def _alone(model: ModelConfig, differences: list[Change], known: list[Family]) -> str:
    """Return a clause if all families with the model's attention have a kind of feed-forward layer that the model
    lacks."""
    kind = model.attention.kind
    part = next((change for change in differences if change.key == "feed_forward.kind"), None)
    alike = [family.model for family in known if family.model.get("attention", {}).get("kind") == kind]
    if part is None or not alike or {each["feed_forward"]["kind"] for each in alike} != {part.before}:
        return ""
    return f", which every family with model.attention.kind = {kind} has"
