"""How many drafts of the next tokens a generation reads, by how often its drafts were accepted. Imports no JAX."""

from dataclasses import dataclass

# A draft is read where it is accepted at least this often: on a CPU a row more takes about this share of a small step
# (benchmarks/results, speculation.json), on other chips less.
_WORTH = 0.3
_MEMORY = 0.85  # the weight of what was known before one more draft


@dataclass
class Acceptance:
    """The share of a generation's first drafts that were accepted, lately: of drafts that were read and of drafts that
    were not, since each is compared with what was drawn in its place.

    Speculation by equality (arXiv:2408.07978) accepts the j-th draft with probability about share^j.
    """

    share: float = 0.6

    def update(self, right: int, wrong: int) -> None:
        """Take note of drafts that equal what was drawn in their places, and of those that do not."""
        for was_right in [1.0] * right + [0.0] * wrong:
            self.share = _MEMORY * self.share + (1.0 - _MEMORY) * was_right

    def drafts(self, most: int) -> int:
        """Return how many drafts are worth a row each, of at most so many."""
        count, probability = 0, self.share
        while count < most and probability >= _WORTH:
            count, probability = count + 1, probability * self.share
        return count
