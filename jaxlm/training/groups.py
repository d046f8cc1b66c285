"""Parameter groups: each parameter's scale of the learning rate, and its weight decay."""

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase

import jax
from flax import nnx

from jaxlm.core.errors import InputError
from jaxlm.models import tree as model_tree
from jaxlm.models.tree import Tree
from jaxlm.training.config import OptimizerConfig, ParameterGroupConfig


@dataclass(frozen=True)
class Rule:
    """The update rule of one parameter: `scale` multiplies its learning rate; at 0 it is frozen."""

    scale: float
    weight_decay: float


def rules(settings: OptimizerConfig, tree: nnx.State) -> Tree:
    """Return the `Rule` of each parameter: that of the first group whose pattern matches its path.

    Raises InputError for a pattern that no parameter is left for, and names paths that are near.
    """
    dimensions = model_tree.dimensions(tree)
    group_of = _assign(settings.groups, list(model_tree.paths(dimensions)))

    def rule(path: tuple, leaf: model_tree.Dimensions) -> Rule:
        if leaf.is_state:
            return Rule(0.0, 0.0)
        group = group_of.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        decay = settings.weight_decay if leaf.inputs else 0.0
        if group is None:
            return Rule(1.0, decay)
        return Rule(group.learning_rate_scale, decay if group.weight_decay is None else group.weight_decay)

    return jax.tree_util.tree_map_with_path(rule, dimensions)


def state_scales(settings: OptimizerConfig, tree: nnx.State) -> dict[str, float]:
    """Return by path what multiplies the steps by which state is moved: the `learning_rate_scale` of its group."""
    dimensions = model_tree.paths(model_tree.dimensions(tree))
    group_of = _assign(settings.groups, list(dimensions))
    return {
        path: group_of[path].learning_rate_scale if path in group_of else 1.0
        for path, d in dimensions.items()
        if d.is_state
    }


def frozen(groups: tuple[ParameterGroupConfig, ...], paths: list[str]) -> frozenset[str]:
    """Return the paths of the frozen parameters of a model. Raises InputError as `rules` does."""
    return frozenset(path for path, group in _assign(groups, paths).items() if not group.learning_rate_scale)


def _assign(groups: tuple[ParameterGroupConfig, ...], paths: list[str]) -> dict[str, ParameterGroupConfig]:
    """Return {path: its group}, for the paths that have one."""
    group_of: dict[str, ParameterGroupConfig] = {}
    for index, group in enumerate(groups):
        matched = [path for path in paths if fnmatchcase(path, group.pattern)]
        free = [path for path in matched if path not in group_of]
        key = f"optimizer.groups[{index}].pattern = {group.pattern!r}"
        if not matched:
            near = difflib.get_close_matches(group.pattern, paths, 3, cutoff=0.4) or paths[:3]
            raise InputError(f"{key} matches no parameter; there are {', '.join(near)}")
        if not free:
            raise InputError(f"{key} comes too late: an earlier group has {matched[0]} and all that it matches")
        group_of.update(dict.fromkeys(free, group))
    return group_of
