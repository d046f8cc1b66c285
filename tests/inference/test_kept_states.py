"""States, and keys of windows, that stay for prefixes: how many a text leaves, and what is found with them."""

import random

import pytest

from jaxlm.inference.pages import PageGroup, Pages
from jaxlm.inference.requests import Request
from jaxlm.inference.scheduler import Scheduler


@pytest.mark.parametrize("slots, staying", [(1, 3), (64, 17)])
def test_a_prompt_of_8192_tokens_takes_three_pages_of_states_and_its_multiples_of_512(slots, staying):
    """Three for each slot, as `most_pages` counts them, do not delay it; were each to stay, it would take 256."""
    pages = Pages([PageGroup(300), PageGroup(3 * slots + 1, 2, 512)], 32)
    sizes = {"chunk_tokens": 512, "tile": 32, "max_queued": 1, "max_queued_tokens": 10**4, "max_context": 10**4}
    scheduler = Scheduler([pages], slots=slots, **sizes)
    generation = scheduler.submit(Request([at % 97 for at in range(8192)], 1))
    for _ in range(8192 // 512):
        plan = scheduler.plan()
        assert pages.held[1] <= 3
        scheduler.commit(plan, {each.id: [1] for each in plan.draws})
    assert generation.end == "length" and pages.cached == (256, staying)


def drawn(generation, steps):
    """Tokens of so many steps, which depend on the text and the place alone."""
    return [(generation.id * 7919 + (len(generation.tokens) + step) * 104729) % 997 for step in range(steps)]


def chats(group, steps=1):
    """The share of the tokens of prompts that is found where users talk in turns behind one of two beginnings."""
    draw, pages = random.Random(0), Pages([PageGroup(9999), PageGroup(*group)], 4)
    sizes = {"chunk_tokens": 64, "tile": 4, "max_queued": 99, "max_queued_tokens": 10**6, "max_context": 10**4}
    scheduler = Scheduler([pages], slots=6, steps_of=lambda _: steps, **sizes)
    beginnings = [[draw.randrange(999) for _ in range(n)] for n in (60, 130)]
    texts, asked = [[*draw.choice(beginnings)] for _ in range(18)], []
    turns = [user for _ in range(4) for user in draw.sample(range(18), 18)]
    for six in zip(*[iter(turns)] * 6, strict=True):
        for user in six:
            texts[user] += [draw.randrange(999) for _ in range(draw.randint(5, 50))]
            asked.append(scheduler.submit(Request(texts[user], draw.randint(6, 60))))
        ahead = None
        while (plan := scheduler.plan()) or ahead:
            if ahead:
                scheduler.commit(ahead, {each.id: drawn(each, ahead.steps) for each in ahead.draws})
            ahead = plan
        for user, generation in zip(six, asked[-6:], strict=True):
            texts[user] = generation.tokens
    assert not scheduler.preemptions
    return sum(each.cached for each in asked) / sum(each.prompt for each in asked)


def test_states_at_multiples_and_ends_find_what_all_states_find_with_more_room():
    """But for the first texts that differ behind a beginning: states that stay in the middle of texts take the room of
    those at the ends. Texts that end within several steps of a dispatch are found too."""
    most = chats((999, 2, 4))
    assert chats((30, 2, 4)) < most / 1.9
    assert chats((30, 2, 32)) > most - 0.003 and chats((36, 2, 32), steps=4) > most - 0.003


def test_keys_that_windows_leave_within_several_steps_of_a_dispatch_are_found():
    """A window that is shorter than the steps leaves pages before the host knows what is drawn."""
    assert chats((60, 2)) == chats((60, 2), steps=8) > 0.8
