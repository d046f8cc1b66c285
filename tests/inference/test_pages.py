"""Pages of the key/value cache are shared, found again, evicted, and never lost."""

import subprocess
import sys
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import InputError
from jaxlm.inference import pages as pages_module
from jaxlm.inference.cache_memory import most_pages
from jaxlm.inference.pages import PageGroup, Pages

SIZE = 4
TEXT = tuple(range(100, 140))


def full(count, size=SIZE):
    return Pages([PageGroup(count)], size)


def written(pages, tokens, salt=b"", step=1):
    """Hold and publish the pages of a text, written so many tokens at a time."""
    holding = pages.match(tokens, salt)
    while holding.tokens < len(tokens):
        assert pages.extend(holding, min(holding.tokens + step, len(tokens)))
        pages.publish(holding, tokens[: holding.tokens])
        pages.check()
    return holding


def found(pages, tokens, salt=b""):
    """The tokens of a text that are found."""
    holding = pages.match(tokens, salt)
    pages.release(holding)
    pages.check()
    return holding.tokens


def test_neither_pages_nor_scheduler_import_jax():
    code = "import sys, jaxlm.inference.scheduler; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_prefix_of_whole_pages_is_found_and_leaves_a_token_to_read():
    pages = full(20)
    pages.release(written(pages, TEXT[:14]))
    lengths = {0: 0, 1: 0, 4: 0, 5: 4, 8: 4, 9: 8, 12: 8, 13: 12, 14: 12, 40: 12}
    assert {n: found(pages, TEXT[:n]) for n in lengths} == lengths
    assert found(pages, (*TEXT[:5], 0, *TEXT[6:14])) == 4
    assert found(pages, (0, *TEXT[1:14])) == 0
    assert pages.held == (0,) and pages.cached == (3,)


def test_sequences_share_whole_pages_and_write_to_their_own():
    pages = full(20)
    first = written(pages, TEXT[:10])
    second = written(pages, TEXT[:10])
    assert first.tables[0][:2] == second.tables[0][:2] and first.tables[0][2] != second.tables[0][2]
    assert pages.held == (4,)
    pages.release(first)
    assert pages.held == (3,)  # the shared ones are the second's
    pages.release(second)
    assert pages.held == (0,)


def test_two_that_write_one_text_at_once_keep_their_own_pages():
    pages = full(20)
    both = [pages.match(TEXT[:9]), pages.match(TEXT[:9])]
    for holding in both:
        assert pages.extend(holding, 9)
    for holding in both:
        pages.publish(holding, TEXT[:9])
        pages.check()
    assert not {*both[0].tables[0]} & {*both[1].tables[0]}
    pages.release(both[0])
    assert found(pages, TEXT[:9]) == 8
    pages.release(both[1])
    pages.check()
    assert pages.cached == (2,)


def test_a_prefix_is_forgotten_with_the_last_that_held_or_had_it():
    pages = full(7)
    both = [pages.match(TEXT[:9]), pages.match(TEXT[:9])]
    for holding in both:
        assert pages.extend(holding, 8)
        pages.publish(holding, TEXT[:8])
    pages.release(both[0])
    other = pages.match(())
    assert pages.extend(other, 16) and pages.cached == (0,)  # evicts what was found
    assert found(pages, TEXT[:9]) == 0
    pages.release(both[1])
    pages.check()
    pages.release(other)
    pages.check()
    assert pages.cached == (0,)


def test_a_salt_keeps_prefixes_apart():
    """Nobody learns from the time to an answer that another, under another salt, asked the same."""
    pages = full(20)
    pages.release(written(pages, TEXT[:14], b"one"))
    assert [found(pages, TEXT[:14], salt) for salt in (b"one", b"two", b"", b"on")] == [12, 0, 0, 0]


def test_two_salts_keep_one_text_each():
    pages = full(20)
    for salt in (b"one", b"two"):
        pages.release(written(pages, TEXT[:14], salt))
    assert [found(pages, TEXT[:14], salt) for salt in (b"one", b"two")] == [12, 12] and pages.cached == (6,)


def test_fields_of_a_digest_are_told_apart():
    """A salt that is spelled like a page, or a page like a salt, has another digest."""
    root, digest = pages_module._root, pages_module._digest
    page = digest(root(b""), (1, 2))
    assert page not in (root(root(b"") + bytes(16)), root(b"page" + root(b"") + bytes([1, *[0] * 7, 2, *[0] * 7])))
    assert len({page, digest(root(b""), (1, 2 << 8)), digest(root(b""), (1,)), digest(page, (1, 2))}) == 4


@pytest.mark.parametrize("salts", [(b"", b""), (b"one", b"two")])
def test_texts_whose_digests_collide_never_get_each_others_pages(salts):
    """A hit compares tokens, all that comes before them, and the salt."""
    one, other = (1, 2, 3, 4), (5, 6, 7, 8)
    with patch.object(pages_module, "_digest", lambda before, tokens: bytes([sum(tokens) % 2])):
        pages = full(20)
        pages.release(written(pages, (*one, 0), salts[0]))
        holding = written(pages, (*other, *one, 0), salts[1])
        assert found(pages, (*one, 0), salts[0]) == 4
        assert found(pages, (*other, *one, 0), salts[1]) == 0
        assert found(pages, (*one, 0), b"three") == 0
        pages.release(holding)
        pages.check()


def test_a_page_after_others_is_another_page():
    with patch.object(pages_module, "_digest", lambda before, tokens: bytes(tokens)):
        pages = full(20)
        pages.release(written(pages, TEXT[:9]))
        pages.release(written(pages, (*TEXT[20:24], *TEXT[4:9])))
        assert found(pages, (*TEXT[20:24], *TEXT[4:9])) == 4 and found(pages, TEXT[4:9]) == 0


def test_room_is_exact():
    pages = full(6)
    assert [pages.fits(tokens) for tokens in (19, 20, 21)] == [True, True, False]
    holding, other = pages.match(TEXT), pages.match(TEXT)
    assert pages.room(holding) == 20 and not pages.extend(holding, 21) and pages.held == (0,)
    assert pages.extend(holding, 16) and pages.held == (4,)
    assert pages.extend(other, 4) and not pages.extend(other, 5)
    assert not pages.extend(holding, 17) and pages.extend(holding, 16)
    assert pages.has_room(holding, 17, without=[other]) and not pages.has_room(holding, 17)
    assert not pages.has_room(holding, 17, spare=1, without=[other])
    pages.release(other)
    assert pages.extend(holding, 20) and not pages.extend(holding, 21)
    pages.release(holding)
    pages.check()


def test_pages_that_others_share_are_no_room():
    pages = full(6)
    first, second = written(pages, TEXT[:9]), written(pages, TEXT[:9])
    third = pages.match(())
    assert pages.has_room(third, 4) and not pages.has_room(third, 5)
    assert pages.has_room(third, 8, without=[second]) and not pages.has_room(third, 9, without=[second])
    assert pages.has_room(third, 20, without=[first, second])


def test_the_least_recently_used_is_evicted_and_of_a_text_its_end_first():
    pages = full(9)
    pages.release(written(pages, TEXT[:13]))
    pages.release(written(pages, TEXT[20:33]))
    assert found(pages, TEXT[:13]) == 12  # which uses it again
    holding = pages.match(())
    assert pages.extend(holding, 12)  # two are free, and one goes
    assert (found(pages, TEXT[20:33]), found(pages, TEXT[:13])) == (8, 12)
    assert not pages.extend(holding, 33) and pages.extend(holding, 20)
    assert (found(pages, TEXT[20:33]), found(pages, TEXT[:13])) == (0, 12)
    pages.release(holding)


def test_a_text_that_was_partly_evicted_is_published_again():
    pages = full(6)
    pages.release(written(pages, TEXT[:16]))
    other = pages.match(())
    assert pages.extend(other, 12) and found(pages, TEXT[:16]) == 8
    pages.release(other)
    pages.release(written(pages, TEXT[:16]))
    assert found(pages, (*TEXT[:16], 0)) == 16


@pytest.mark.parametrize("window", range(1, 12))
def test_a_window_keeps_the_pages_that_its_next_token_reads(window):
    pages = Pages([PageGroup(12), PageGroup(12, window)], SIZE)
    holding = pages.match(TEXT)
    most = 0
    for token in range(len(TEXT)):
        assert pages.extend(holding, token + 1)
        pages.publish(holding, TEXT[: token + 1])
        pages.check()
        kept = [at for at, page in enumerate(holding.tables[1]) if page]
        assert kept == list(range(max(token - window + 1, 0) // SIZE, token // SIZE + 1))
        assert all(holding.tables[0])
        most = max(most, len(kept))
    alone = Pages([PageGroup(most + 1, window)], SIZE)
    assert alone.fits(10**9)
    assert most == 1 or not Pages([PageGroup(most, window)], SIZE).fits(10**9)
    pages.release(holding)
    pages.check()


def test_tokens_written_together_keep_all_that_the_first_of_them_reads():
    pages = Pages([PageGroup(12, 5)], SIZE)
    holding = pages.match(TEXT)
    assert pages.extend(holding, 20) and [*map(bool, holding.tables[0])] == [True] * 5
    pages.publish(holding, TEXT[:20])
    assert pages.extend(holding, 40) and [*map(bool, holding.tables[0])] == [False] * 4 + [True] * 6


def test_a_prefix_needs_the_pages_of_a_window_at_its_end_and_all_of_a_full_layer():
    """A gap before the window does not matter; one within the window, or in a full layer, does."""
    pages = Pages([PageGroup(12), PageGroup(5, 5)], SIZE)
    holding = written(pages, TEXT[:33])
    assert [*map(bool, holding.tables[1])] == [False] * 7 + [True] * 2
    pages.release(holding)  # of the window the last pages are cached: all but the first ones, which went
    assert found(pages, TEXT[:33]) == 32
    again = pages.match(TEXT[:33])
    assert [*map(bool, again.tables[1])] == [False] * 7 + [True] and all(again.tables[0])
    pages.release(again)
    other = pages.match(())
    assert pages.extend(other, 16)  # takes the window's pages
    assert found(pages, TEXT[:33]) == 0 and pages.cached[0] > 0

    pages = Pages([PageGroup(10), PageGroup(40, 5)], SIZE)
    pages.release(written(pages, TEXT[:33]))
    other = pages.match(())
    assert pages.extend(other, 12)  # one was free; two go from the end
    assert found(pages, TEXT[:33]) == 24 and pages.cached == (6, 8)


def hits(pages, tokens):
    """The tokens that are found, and what each group had and lacked."""
    holding = pages.match(tokens)
    pages.release(holding)
    return holding.tokens, *(tuple(hit) for hit in holding.hits)


def test_hits_are_told_by_group():
    """A prefix of keys that is not used since no state stands at its end is said to be lacked by the states."""
    pages = Pages([PageGroup(40), PageGroup(6, 2)], SIZE)
    pages.release(written(pages, TEXT[:33]))
    assert hits(pages, TEXT[:33]) == (32, (32, 0), (32, 0))
    assert hits(pages, (*TEXT[:14], 0, 0, 0)) == (0, (12, 0), (0, 12))
    assert hits(pages, (*TEXT[:26], 0, 0, 0)) == (24, (24, 0), (24, 0))
    assert hits(full(20), TEXT) == (0, (0, 0))
    pages = Pages([PageGroup(6), PageGroup(20, 2)], SIZE)
    pages.release(written(pages, TEXT[:17]))
    other = pages.match(())
    assert pages.extend(other, 13) and hits(pages, TEXT[:17]) == (4, (4, 12), (16, 0))
    assert pages_module.added([[(1, 2), (3, 4)], [(5, 6), (7, 8)]]) == [(6, 8), (10, 12)]


def test_states_at_the_ends_of_texts_and_where_texts_differ_outlive_those_between():
    """The next turns of conversations go on from the ends, and other conversations from what all begin with."""
    pages = Pages([PageGroup(200), PageGroup(11, 2)], SIZE)  # ten: of six ends, a beginning, and a text under way
    texts = [(*TEXT[:12], *[n] * 22) for n in range(6)]
    for text in texts:
        pages.release(written(pages, text, step=8))
    assert [found(pages, (*text, 0)) for text in texts] == [32] * 6
    assert found(pages, (*TEXT[:12], 7)) == 12
    for turn in (9, 8):  # the end before is of no use any more
        texts = [(*text, *[turn] * 8) for text in texts]
        for text in texts:
            pages.release(written(pages, text, step=8))
        assert [found(pages, (*text, 0)) for text in texts] == [len(text) // SIZE * SIZE for text in texts]
        assert found(pages, (*TEXT[:12], 7)) == 12


def of_states(count, interval=16, keys=200):
    return Pages([PageGroup(keys), PageGroup(count, 2, interval)], SIZE)


def test_states_take_pages_at_multiples_and_ends_alone():
    """Not where a prompt, or what is drawn, only goes by. A text that differs elsewhere goes on from the multiple
    before, the next one from where they differ."""
    pages = of_states(20)
    holding = pages.match(TEXT[:30])
    for tokens in (22, 30):
        assert pages.extend(holding, tokens)
        pages.publish(holding, TEXT[:tokens])
        pages.check()
        assert pages.held[1] <= 4  # where it goes on from, 16, the last whole page, and the page after that
    for tokens in range(31, 39):  # the prompt ends at 28, the text at 36
        assert pages.extend(holding, tokens)
        pages.publish(holding, TEXT[:tokens])
        assert pages.held[1] <= 2
    pages.release(holding)
    pages.check()
    assert pages.cached == (9, 4)  # at 16, 28, 32 and 36
    assert [found(pages, TEXT[:n]) for n in (21, 29, 32, 33, 40)] == [16, 28, 28, 32, 36]
    other = (*TEXT[:22], *range(9))
    assert hits(pages, other) == (16, (20, 0), (16, 4))
    pages.release(written(pages, other, step=31))
    assert hits(pages, (*TEXT[:22], 0, 0)) == (20, (20, 0), (20, 0))


def test_a_prompt_needs_the_state_before_and_the_one_after_alone():
    """No other stays where there is no room for more; a state that another could find is written over by nobody."""
    pages = of_states(3)
    holding = pages.match(TEXT)
    for tokens in (18, 24, 39, 40):
        assert pages.room(holding) == 199 * SIZE  # of keys
        assert pages.extend(holding, tokens)
        pages.publish(holding, TEXT[:tokens])
        pages.check()
    pages.release(holding)
    assert found(pages, (*TEXT, 0)) == 40
    first, second = pages.match(()), pages.match(TEXT[20:])
    assert pages.extend(first, 1) and pages.extend(second, 7)
    pages.publish(second, TEXT[20:27])
    assert pages.extend(second, 16)
    pages.publish(second, TEXT[20:36])
    assert pages.room(second) == 16 and not pages.extend(second, 17)
    pages.check()
    assert found(pages, TEXT[20:]) == 16


@pytest.mark.parametrize("group", [(20, 2, 16), (20, 1), (20, 2), (20, 3), (20, 9)], ids=str)
def test_a_text_s_end_within_several_steps_of_a_dispatch_is_found(group):
    """The host knows what is drawn a dispatch later than it is written: states, and keys that a window leaves behind,
    stay until they are published."""
    for end in range(5, 30):
        pages = Pages([PageGroup(200), PageGroup(*group)], SIZE)
        holding = pages.match(TEXT[:5])
        assert pages.extend(holding, 5)
        for known in range(5, end, 3):
            pages.publish(holding, TEXT[:known])
            assert pages.extend(holding, known + 6, known + 4)
            assert pages.held[1] <= most_pages(99, group[1], SIZE)
            holding.tokens = known + 6
        pages.publish(holding, TEXT[:end])
        pages.release(holding)
        pages.check()
        assert found(pages, TEXT[: end + 1]) == end // SIZE * SIZE


def test_bad_use_is_refused():
    pages = full(4)
    holding = pages.match(TEXT)
    pages.release(holding)
    with pytest.raises(KeyError):
        pages.release(holding)
    for groups, size in (([], 4), ([PageGroup(1)], 4), ([PageGroup(4)], 0)):
        with pytest.raises(InputError, match="2 pages"):
            Pages(groups, size)
    for group in (PageGroup(4, 2, 6), PageGroup(4, None, 8), PageGroup(4, 2, 0)):
        with pytest.raises(InputError, match="a multiple of their pages of 4 tokens"):
            Pages([group], 4)


@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    groups=st.lists(
        st.tuples(st.integers(2, 9), st.none() | st.integers(1, 9), st.sampled_from((None, None, 1, 3))),
        min_size=1,
        max_size=3,
    ),
    size=st.integers(1, 4),
    actions=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 1), st.integers(0, 24)), max_size=40
    ),
)
def test_pages_balance_whatever_is_done(groups, size, actions):
    pages = Pages(
        [PageGroup(n, 2, every * size) if every else PageGroup(n, window) for n, window, every in groups], size
    )
    holdings = []
    for kind, which, text, number in actions:
        tokens = [text, *[0] * 11, *[text] * 12]
        if kind == 0:
            holdings.append((pages.match(tokens[:number], bytes([which % 2])), tokens))
            assert holdings[-1][0].tokens < max(number, 1)
        elif holdings and kind < 3:
            holding, tokens = holdings[which % len(holdings)]
            room, before = pages.room(holding), [table[:] for table in holding.tables]
            if pages.extend(holding, number):
                assert number <= room and all(len(table) * size >= number for table in holding.tables)
            else:
                assert number > room and holding.tables == before
            if kind == 2:
                pages.publish(holding, tokens[: holding.tokens])
        elif holdings:
            pages.release(holdings.pop(which % len(holdings))[0])
        pages.check()
    for holding, _ in holdings:
        pages.release(holding)
    pages.check()
    assert not any(pages.held)
