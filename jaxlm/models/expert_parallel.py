"""The choice of how tokens reach the devices of their experts (`mesh.expert`). Imports no JAX."""

from fractions import Fraction

from jaxlm.models.config import ModelConfig
from jaxlm.models.execution_config import ExpertParallel, ExpertWay
from jaxlm.models.feed_forward_config import MixtureFeedForwardConfig

# What is done unless several devices of a training step share out experts.
GATHERED: ExpertWay = "gather"
# The room for rows that are sent to a device, over an equal share. With more, more bytes are sent in vain; with less,
# more passes are needed.
ROOM = Fraction(5, 4)


def way(wanted: ExpertParallel, model: ModelConfig, devices: int) -> ExpertWay:
    """Return how tokens reach their experts, which so many devices share out: as it is wanted, or of "auto" what sends
    fewer bytes.

    For each channel of its tokens and pass a device gathers `devices` numbers, and sends `ROOM` for each expert that a
    token chooses.
    """
    mixtures = [each.feed_forward for each in model.layers if isinstance(each.feed_forward, MixtureFeedForwardConfig)]
    if devices == 1 or not mixtures:
        return GATHERED
    if wanted != "auto":
        return wanted
    widths = [each.latent_dim or model.d_model for each in mixtures]
    gathered = devices * sum(widths)
    sent = ROOM * sum(each.experts_per_token * width for each, width in zip(mixtures, widths, strict=True))
    return "all_to_all" if sent < gathered else GATHERED
