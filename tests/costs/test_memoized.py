"""Results that are computed once."""

from jaxlm.costs.memoized import memoized_in


class Counter:
    def __init__(self):
        self.answers, self.calls = {}, 0

    @memoized_in("answers")
    def twice(self, n: int) -> int:
        self.calls += 1
        return 2 * n


def test_a_result_is_computed_once_for_each_arguments_and_method():
    @memoized_in("answers")
    def twice(counter, n):
        return -2 * n

    one, other = Counter(), Counter()
    other.answers = one.answers
    assert [one.twice(3), other.twice(3), one.twice(4)] == [6, 6, 8] and (one.calls, other.calls) == (2, 0)
    assert twice(one, 3) == -6 and other.twice(3) == 6
