"""The scheduler before a simulated device, which verifies that each row reads the keys of its own prefix."""

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import InputError
from jaxlm.inference.acceptance import DraftWorth
from jaxlm.inference.pages import PageGroup, Pages
from jaxlm.inference.requests import Request
from jaxlm.inference.scheduler import Full, NeverFits, Scheduler

VOCABULARY = 5  # small, so that texts share prefixes and meet their ends
END = 0


def next_token(stream, text):
    """The token that a request draws after a text: its noise is a function of the stream and the position."""
    is_noisy = zlib.crc32(bytes([stream, len(text)])) % 2 == 0
    return zlib.crc32(bytes([stream if is_noisy else 0, *text])) % VOCABULARY


def guess(text):
    """The token that a device foresees after a text, of any stream: often right, as the drafts of a good proposer."""
    return zlib.crc32(bytes([0, *text])) % VOCABULARY


def text_of(request, stop_token_ids=()):
    """The tokens that a request draws alone, and why it ends."""
    drawn = []
    while len(drawn) < request.max_tokens:
        token = next_token(request.stream, (*request.prompt, *drawn))
        if token in stop_token_ids:
            return drawn, "stop"
        drawn.append(token)
    return drawn, "length"


class SimulatedDevice:
    """A shard of devices that keeps, for each place in the pages of a group, the salted prefix that the key there is
    of, and for a page of states that of its state. Rows of drafts are read and refused as `speculation` says; a row of
    several steps reads what it draws."""

    def __init__(self, groups, size):
        self.groups, self.size = groups, size
        self.keys = {}
        self.of_tokens = [group for group, each in enumerate(groups) if each.interval is None]
        self.of_states = [group for group, each in enumerate(groups) if each.interval is not None]
        self.texts = {}  # by slot, with the last token, which the host may not have seen

    def run(self, plan):
        """Return the draws of a step. As a layer does, write all keys before any is read."""
        rows = []
        for run, slot in zip(plan.decode, plan.slots, strict=False):
            text, known = self.texts[slot], run.generation.tokens
            assert text[: len(known)] == tuple(known), "a run goes on from what the host knows"
            start, foreseen = len(text) - 1, text
            for _ in range(run.drafts):
                foreseen = (*foreseen, guess(foreseen))
            for _ in range(run.steps - 1):
                foreseen = (*foreseen, next_token(run.generation.request.stream, foreseen))
            stop = max(min(start + run.steps + run.drafts, run.limit), start)
            rows.append((run.generation, foreseen[:stop], start, stop))
        rows += [(c.generation, tuple(c.generation.tokens[: c.stop]), c.start, c.stop) for c in plan.chunks]
        written = {}
        for row, ((generation, text, start, stop), tables) in enumerate(zip(rows, plan.tables, strict=True)):
            for group in self.of_tokens:
                table = tables[group]
                for at in range(start, stop):
                    place = group, table[at // self.size], at % self.size
                    assert place[1] and place not in written, "each row writes to a place of its own"
                    written[place] = row
                    self.keys[place] = generation.salt, text[: at + 1]
        writers = {place[:2]: row for place, row in written.items()}
        for row, ((generation, text, start, stop), tables) in enumerate(zip(rows, plan.tables, strict=True)):
            for group in self.of_tokens:
                table = tables[group]
                assert all(writers.get((group, page), row) == row for page in table if page), (
                    "no shared page is written"
                )
                window = self.groups[group].window or stop
                for at in range(max(start - window + 1, 0), stop):
                    key = self.keys[group, table[at // self.size], at % self.size]
                    assert table[at // self.size] and key == (generation.salt, text[: at + 1]), "it reads its own keys"
        self.carry(rows, plan)
        draws, foreseen = {}, set()
        ends = [True] * len(plan.decode) + [chunk.draws for chunk in plan.chunks]
        for row, ((generation, text, start, stop), slot, is_end) in enumerate(zip(rows, plan.slots, ends, strict=True)):
            if not is_end:
                continue
            drawn = []
            for read in range(start + 1, stop + 1) if row < len(plan.decode) else [stop]:
                if drawn and drawn[-1] != text[read - 1]:
                    break
                drawn.append(next_token(generation.request.stream, text[:read]))
                self.texts[slot] = (*text[:read], drawn[-1])
            draws[generation.id] = drawn
            if drawn and drawn[-1] == guess(self.texts[slot][:-1]):
                foreseen.add(generation.id)
        assert draws.keys() == {generation.id for generation in plan.draws}
        return draws, foreseen

    def carry(self, rows, plan):
        """Write the states after the tokens of rows, one after the other, each over that of its page."""
        writers = {}
        for row, ((generation, text, start, stop), tables) in enumerate(zip(rows, plan.tables, strict=True)):
            for group in self.of_states:
                table = tables[group]
                for at in range(start, stop):
                    if at:
                        state = self.keys[group, table[(at - 1) // self.size]]
                        assert state == (generation.salt, text[:at]), "it goes on from its own state"
                    page = table[at // self.size]
                    assert page and writers.setdefault((group, page), row) == row, "no shared page is written"
                    self.keys[group, page] = generation.salt, text[: at + 1]


@dataclass
class SimulatedEngine:
    """A loop of plans, dispatches and commits, of which `ahead` are in flight. Groups, slots and chunks are those of
    each shard."""

    groups: list
    shards: int = 1
    size: int = 4
    slots: int = 4
    chunk: int = 8
    tile: int = 2
    ahead: int = 1
    max_queued: int = 100
    max_queued_tokens: int = 10_000
    max_context: int = 1000
    drafts: int = 0
    steps: int = 1  # of a dispatch, without drafts
    draws: dict = field(default_factory=dict)  # by id
    plans: list = field(default_factory=list)

    def __post_init__(self):
        self.pages = [Pages(self.groups, self.size) for _ in range(self.shards)]
        self.devices = [SimulatedDevice(self.groups, self.size) for _ in range(self.shards)]
        self.flight = deque()
        self.scheduler = Scheduler(
            self.pages,
            slots=self.slots,
            chunk_tokens=self.chunk,
            tile=self.tile,
            max_queued=self.max_queued,
            max_queued_tokens=self.max_queued_tokens,
            max_context=self.max_context,
            drafts=self.drafts,
            worth=DraftWorth([], measures=False) if self.drafts else None,
            steps_of=lambda _: 1 if self.drafts else self.steps,
        )

    def submit(self, prompt, max_tokens=4, stream=0, scores_from=None, **options):
        request = Request(prompt, max_tokens, stream=stream, scores_from=scores_from)
        generation = self.scheduler.submit(request, **options)
        self.draws[generation.id] = []
        return generation

    def step(self, between=lambda: None):
        """Dispatch one step, with something done between its plan and that, and commit one. Return the plan."""
        plan = self.scheduler.plan()
        assert plan or self.flight or not (self.scheduler.waiting or self.scheduler.admitted), "it hangs"
        between()
        self.check_pages()
        if plan:
            draws, foreseen = {}, set()
            for shard, device in zip(plan.shards, self.devices, strict=True):
                rows = sum(-(-(chunk.stop - chunk.start) // self.tile) * self.tile for chunk in shard.chunks)
                assert rows <= self.chunk and len({*shard.slots}) == len(shard.slots) <= self.slots
                assert shard.rows_drawn <= self.slots * (1 + self.drafts)
                drawn, right = device.run(shard)
                draws, foreseen = draws | drawn, foreseen | right
            self.flight.append((plan, draws, foreseen))
            self.plans.append(plan)
        if self.flight and (len(self.flight) > self.ahead or not plan):
            committed, draws, foreseen = self.flight.popleft()
            for generation, count in self.scheduler.commit(committed, draws, foreseen):
                for left, token in enumerate(draws[generation.id][:count], 1 - count):
                    self.draws[generation.id].append((token, None if left else generation.end))
            self.check_pages()
        return plan

    def check_pages(self):
        for pages in self.pages:
            pages.check()

    @property
    def pages_held(self):
        return sum(sum(pages.held) for pages in self.pages)

    def fits(self, tokens):
        return self.pages[0].fits(tokens)

    def run(self, limit=1000):
        """Take steps until all have ended."""
        while self.scheduler.waiting or self.scheduler.admitted or self.flight:
            assert (limit := limit - 1), "somebody starves"
            self.step()
        self.check_pages()
        assert not self.pages_held

    def text(self, generation):
        """The tokens that were handed out for a generation, and why it ended."""
        draws = self.draws[generation.id]
        assert all(end is None for _, end in draws[:-1])
        tokens = [token for token, _ in draws]
        if tokens and tokens[-1] in generation.stop_token_ids:
            assert draws[-1][1] == "stop"
            tokens.pop()
        assert generation.tokens == [*generation.request.prompt, *tokens] and generation.drawn == len(tokens)
        return tokens, generation.end

    def check(self, generation):
        """Compare a text with that of the request alone; of one that was taken away, its beginning."""
        tokens, end = text_of(generation.request, generation.stop_token_ids)
        found, why = self.text(generation)
        assert (found, why) == (tokens, end) or (why == "cancelled" and found == tokens[: len(found)])


def full(count, **options):
    return SimulatedEngine([PageGroup(count)], **options)


class Visit(NamedTuple):
    """A request that comes at a step, and may leave, so many steps later, at a point within a step."""

    at: int
    family: int
    length: int
    max_tokens: int
    priority: int
    salt: int
    has_end: bool
    scores_from: int | None
    leaves: int | None
    how: int

    def prompt(self):
        """Two texts, long in common, which end differently."""
        text = [1, 2, 3, 1, 2, 3, 4, 1, 1, 2, 2, 3, 3, 4, 4, 1]
        return [*text[: self.length - 1], 1 + self.family]


BOOLEANS = st.sampled_from((False, False, False, True))
VISITS = st.builds(
    Visit,
    at=st.integers(0, 12),
    family=st.integers(0, 1),
    length=st.integers(1, 16),
    max_tokens=st.integers(1, 10),
    priority=st.integers(0, 2),
    salt=st.sampled_from((0, 0, 0, 1)),
    has_end=BOOLEANS,
    scores_from=st.sampled_from((None, None, None, 0, 2, 5)),
    leaves=st.none() | st.integers(0, 12),
    how=st.integers(0, 3),
)
SIZES = {
    "shards": st.sampled_from((1, 1, 2, 3)),
    "slots": st.integers(1, 5),
    "chunk": st.integers(3, 12),
    "tile": st.integers(1, 3),
    "ahead": st.sampled_from((0, 1, 1, 1, 2)),
    "steps": st.sampled_from((1, 1, 3, 6)),
}


def of_keys(window):
    return st.builds(PageGroup, st.integers(4, 14), st.just(window), st.none())


ENGINES = st.builds(
    SimulatedEngine,
    groups=st.sampled_from((None, (2,), (3,), (5,), (None, 3), (None, 1, 6))).flatmap(
        lambda windows: st.tuples(*(of_keys(w) for w in (windows or (None,))))
    ),
    size=st.integers(1, 5),
    drafts=st.sampled_from((0, 0, 1, 2, 5)),
    **SIZES,
)


def with_states(size, others, every):
    """Engines of states beside groups of keys with these windows."""
    states = st.builds(PageGroup, st.integers(3, 14), st.just(2), st.just(every * size))
    groups = st.tuples(states, *map(of_keys, others))
    return st.builds(SimulatedEngine, groups=groups, size=st.just(size), **SIZES)


OF_STATES = st.tuples(
    st.integers(1, 5), st.sampled_from(((None,), (None,), (), (None, 2))), st.sampled_from((1, 2, 3))
).flatmap(lambda each: with_states(*each))
PROPERTIES = settings(deadline=None, derandomize=True, database=None)


@settings(PROPERTIES, max_examples=100)
@given(engine=ENGINES | OF_STATES, visits=st.lists(VISITS, min_size=1, max_size=12))
def test_each_gets_its_own_text_whatever_comes_and_goes(engine, visits):
    """Nothing is lost, duplicated, starved or leaked, and no row reads a key that is not of its own prefix."""
    serve(engine, visits)


@pytest.mark.exhaustive
@settings(PROPERTIES, max_examples=4000, suppress_health_check=list(HealthCheck))
@given(engine=ENGINES | OF_STATES, visits=st.lists(VISITS, min_size=4, max_size=30))
def test_many_get_their_own_texts(engine, visits):
    serve(engine, visits)


def serve(engine, visits):
    """Let them come and go until none is left, and compare all texts."""
    came, step = [], 0

    def leave(how):
        for generation, visit in came:
            if visit.leaves is not None and visit.how == how and step == visit.at + visit.leaves:
                was, drawn = generation.end, len(engine.draws[generation.id])
                if how == 3:
                    engine.scheduler.finish(generation.id)
                    stopped.update({generation.id} - ({generation.id} if was else set()))
                else:
                    engine.scheduler.cancel(generation.id)
                assert generation.end == (was or ("stop" if how == 3 else "cancelled"))
                left[generation.id] = drawn

    left, stopped = {}, set()
    while step <= 12 or engine.scheduler.waiting or engine.scheduler.admitted or engine.flight:
        for visit in [visit for visit in visits if visit.at == step]:
            prompt = visit.prompt()
            options = {"priority": visit.priority, "salt": bytes([visit.salt]), "scores_from": visit.scores_from}
            try:
                generation = engine.submit(
                    prompt, visit.max_tokens, stop_token_ids=[END] if visit.has_end else [], **options
                )
                came.append((generation, visit))
            except NeverFits:
                assert not engine.fits(len(prompt) + visit.max_tokens - 1)
            else:
                assert engine.fits(len(prompt) + visit.max_tokens - 1)
        leave(0)
        engine.step(between=lambda: leave(1))
        leave(2)
        leave(3)
        step += 1
        assert step < 1500, "somebody starves"
    for generation, _ in came:
        assert generation.end
        if generation.id in stopped:
            assert (
                engine.text(generation)[0]
                == text_of(generation.request, generation.stop_token_ids)[0][: generation.drawn]
            )
        else:
            engine.check(generation)
        scored = [at for plan in engine.plans for c in plan.chunks if c.generation is generation for at in c.scored]
        first = generation.request.scores_from
        expected = [] if first is None else [*range(first, len(generation.request.prompt) - 1)]
        assert scored == (expected[: len(scored)] if generation.id in left else expected), "each once"
        assert len(engine.draws[generation.id]) == left.get(generation.id, len(engine.draws[generation.id]))
        assert (generation.shard, generation.slot, generation.holding, generation.computed) == (-1, -1, None, 0)
    assert not engine.pages_held and not engine.scheduler.failed()


PROMPT = [1, 2, 3, 4, 1, 2, 3, 1, 2, 1]


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("is_between", [False, True], ids=["after", "between"])
def test_one_that_leaves_at_any_time_gives_all_back_and_touches_nobody(steps, is_between):
    """It may wait, read, draw, or be in a plan that is not dispatched; to leave twice, or unknown, does nothing."""
    engine = full(30, slots=3, chunk=4)
    other = engine.submit(PROMPT, 8, stream=1)
    leaving = engine.submit([4, *PROMPT], 4, stream=2)
    waiting = [engine.submit([2, *PROMPT], 4, stream=3) for _ in range(2)]

    def leave():
        for id in (leaving.id, waiting[1].id, leaving.id, 10**6, -1):
            engine.scheduler.cancel(id)
        engine.scheduler.finish(leaving.id)

    for step in range(steps + 1):
        engine.step(between=leave if is_between and step == steps else lambda: None)
    leave()
    assert {leaving.end, waiting[1].end} <= {"cancelled", "length"}
    engine.run()
    engine.check(leaving)
    assert [engine.check(generation) for generation in (other, waiting[0])] and other.end == waiting[0].end == "length"


def test_the_queue_is_bounded_in_requests_and_in_tokens():
    engine = full(100, slots=1, max_queued=3, max_queued_tokens=21)
    long = engine.submit([1] * 40)  # alone it may be longer, or it would be refused for ever
    with pytest.raises(Full, match="1 requests of 40 tokens wait; the queue takes 3 of 21 tokens"):
        engine.submit([1])
    engine.step()
    few = [engine.submit([1] * 10), engine.submit([1] * 9), engine.submit([1])]
    with pytest.raises(Full, match="3 requests of 20 tokens"):
        engine.submit([1])
    engine.scheduler.cancel(few.pop().id)
    with pytest.raises(Full, match="2 requests of 19 tokens"):
        engine.submit([1] * 3)
    few.append(engine.submit([1] * 2))
    engine.run()
    assert {generation.end for generation in (long, *few)} == {"length"}


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 19, 20])
def test_requests_of_all_the_pages_run_and_one_token_more_is_refused(prompt, ahead):
    """With 5 pages of 4 tokens: the last token is drawn and never read, so 20 - prompt + 1 are drawn."""
    for engine in (full(6, ahead=ahead), full(60, ahead=ahead, max_context=20)):
        both = [engine.submit([1 + n] * prompt, 21 - prompt, stream=n) for n in range(2)]
        for length, max_tokens in ((prompt, 22 - prompt), (prompt + 1, 21 - prompt), (21, 1)):
            with pytest.raises(NeverFits, match=r"cache of 21 tokens \(6 pages\).* at most 20 \(5 pages\); shorten"):
                engine.submit([1] * length, max_tokens)
        engine.run()
        for generation in both:
            engine.check(generation)
    for refused in (([], 1), ([1], 0)):
        with pytest.raises(InputError, match="one token of prompt"):
            engine.submit(*refused)


def test_one_that_cannot_go_on_alone_ends_with_an_error(monkeypatch):
    """Instead of being read again for ever; those after it go on."""
    monkeypatch.setattr(Pages, "capacity", 1000)
    engine = full(6)
    stuck, fine, large = engine.submit([1] * 18, 10), engine.submit([2] * 18, 3), engine.submit([3] * 10, 20)
    engine.run()
    assert engine.scheduler.failed() == [stuck, large] and engine.scheduler.failed() == []
    assert stuck.end == large.end == "error" and stuck.drawn == 3
    engine.check(fine)


def test_decodes_have_a_row_in_every_step_and_so_has_a_prompt():
    engine = full(200, slots=6, chunk=4, tile=2)
    drawing = [engine.submit([n + 1], 60, stream=n) for n in range(2)]
    engine.step()
    prompts = [engine.submit([n + 1] * 40, 1) for n in range(3)]
    plans = [engine.step() for _ in range(31)]
    assert [[run.generation for run in plan.shards[0].decode] for plan in plans] == [drawing] * 31
    read = [(chunk.generation, chunk.start, chunk.stop) for plan in plans for chunk in plan.chunks]
    assert read[:30] == [(prompt, at, at + 4) for prompt in prompts for at in range(0, 40, 4)] and len(read) == 30
    engine.run()


def test_prompts_share_a_step_and_no_tile():
    engine = full(100, chunk=12, tile=4, size=32)
    for length in (5, 3, 9):
        engine.submit([length] * length, 1)
    chunks = []
    for waiting in (1, 0):
        chunks.append([(chunk.start, chunk.stop, chunk.draws) for chunk in engine.step().chunks])
        assert engine.scheduler.waiting == waiting
    assert chunks == [[(0, 5, True), (0, 3, True)], [(0, 9, True)]]


def test_samples_of_a_prompt_share_its_pages_and_are_as_alone():
    """They wait for the step in which the first reads it; then each reads the 2 of 10 tokens that fill no page."""
    engine = full(40, chunk=32, tile=2, slots=6)
    samples = [engine.submit(PROMPT, 6, stream=n, scores_from=0 if n == 1 else None) for n in range(5)]
    engine.run()
    chunks = [(step, c.generation, c.start, c.stop) for step, plan in enumerate(engine.plans) for c in plan.chunks]
    assert chunks == [
        *((0, sample, 0, 10) for sample in samples[:2]),
        *((1, sample, 8, 10) for sample in samples[2:]),
    ]
    assert [sample.cached for sample in samples] == [0, 0, 8, 8, 8]
    for sample in samples:
        engine.check(sample)


def test_nobody_waits_for_pages_that_another_reads_without_need():
    """Not under another salt, for a page that it has to read itself, after one of lower priority, or for one read."""
    engine = full(60, chunk=64)
    first = engine.submit(PROMPT)
    fine = [engine.submit(PROMPT, salt=b"other"), engine.submit(PROMPT[:4])]
    assert [chunk.generation for chunk in engine.step().chunks] == [first, *fine]

    engine = full(60)
    engine.submit(PROMPT * 2, priority=1)
    engine.step()
    urgent = engine.submit(PROMPT * 2)
    assert [(chunk.generation, chunk.start) for chunk in engine.step().chunks] == [(urgent, 8)]

    engine = full(11, chunk=32)
    engine.submit(PROMPT, 1)
    engine.submit(PROMPT, 20, scores_from=0)  # has pages of its own, and the others are found
    engine.step()
    engine.submit([4] * 24, 1)  # takes those
    [engine.step() for _ in range(3)]
    last = engine.submit(PROMPT)
    assert [(chunk.generation, chunk.start) for chunk in engine.step().chunks] == [(last, 0)]
    engine.run()


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_was_read_and_drawn_is_found_under_its_salt_by_those_who_want_it(ahead):
    engine = full(60, ahead=ahead)
    first = engine.submit(PROMPT, 7, salt=b"one")  # with 16 tokens read
    engine.run()
    options = {"salt": b"one"}, {}, {"salt": b"one", "scores_from": 0}, {"salt": b"one", "scores_from": 9}
    again = [engine.submit(first.tokens, 1, **each) for each in options]
    engine.run()
    assert [generation.cached for generation in again] == [16, 0, 0, 8]


def test_a_preempted_generation_is_read_again_with_what_it_drew():
    """Its prompt stays its prompt: penalties and usage count as before."""
    engine = full(8, chunk=16)
    first, second = engine.submit([1] * 9, 16, stream=1), engine.submit([2] * 9, 16, stream=2)
    engine.run()
    assert (first.preemptions, first.prompt, first.drawn) == (0, 9, 16)
    assert (second.preemptions, second.prompt, second.drawn) == (1, 9, 16)
    chunks = [chunk for plan in engine.plans for chunk in plan.chunks if chunk.generation is second]
    assert [(chunk.start, chunk.stop) for chunk in chunks if chunk.draws] == [(6, 9), (4, 13)] and second.cached == 0
    for generation in (first, second):
        engine.check(generation)


def test_tokens_are_counted_to_the_last_one():
    """An id that ends a text is none of its tokens; what the row behind it drew is dropped."""
    for ahead in (0, 1, 2):
        engine = full(60, ahead=ahead, slots=8)
        all_streams = [engine.submit([1, 2], 7, stream=n, stop_token_ids=[END]) for n in range(8)]
        all_streams += [engine.submit([1, 2], n, stream=9) for n in (1, 2, 7)]
        engine.run()
        for generation in all_streams:
            engine.check(generation)
        assert {generation.end for generation in all_streams} == {"stop", "length"}


def test_ends_of_the_request_and_of_the_tokenizer_both_end():
    engine = full(60)
    stream = next(n for n in range(256) if text_of(Request([1], 9, stream=n), (3, 4))[0] == [1, 2])
    generation = engine.scheduler.submit(Request([1], 9, stream=stream, stop_token_ids=[3]), stop_token_ids=[4])
    engine.draws[generation.id] = []
    engine.run()
    assert engine.text(generation) == ([1, 2], "stop")


def test_a_stop_string_ends_a_generation_and_its_pages_stay_to_be_found():
    engine = full(60, ahead=0)
    generation = engine.submit(PROMPT, 30)
    while len(engine.draws[generation.id]) < 7:
        engine.step()
    engine.scheduler.finish(generation.id)
    assert generation.end == "stop" and engine.pages[0].cached == (4,)
    engine.run()
    assert len(engine.text(generation)[0]) == 7


def test_the_youngest_gives_way():
    engine = full(12, chunk=30)
    three = [engine.submit([n + 1] * 9, 12, stream=n) for n in range(3)]
    engine.run()
    assert [generation.preemptions for generation in three] == [0, 0, 1]


@pytest.mark.parametrize("options", [{"slots": 2}, {"count": 10}], ids=["slots", "pages"])
def test_priority_takes_slots_and_pages_from_lower_and_age_does_not(options):
    engine = full(**{"count": 100, "chunk": 20, **options})
    low = [engine.submit([n + 1] * 9, 7, stream=n, priority=5) for n in range(2)]
    [engine.step() for _ in range(2)]
    same = engine.submit([3] * 9, 7, stream=3, priority=5)
    urgent = engine.submit([4] * 9, 7, stream=4)
    plan = engine.step()
    assert [chunk.generation for chunk in plan.chunks] == [urgent] and low[0] in plan.shards[0].draws
    assert [generation.preemptions for generation in (*low, same, urgent)] == [0, 1, 0, 0]
    engine.run()
    for generation in (*low, same, urgent):
        engine.check(generation)


def test_nothing_begins_that_the_next_draws_would_stop():
    """A page for each that draws stays free, or else what begins would be thrown out and read again."""
    engine = full(7, chunk=20)
    first = engine.submit([1] * 8, 9)
    engine.step()
    second = engine.submit([2] * 13, 1)  # 4 pages of the 4 that are left
    engine.run()
    assert second.preemptions == 0
    starts = [n for n, plan in enumerate(engine.plans) for chunk in plan.chunks if chunk.generation is second]
    assert len(starts) == 1 and starts[0] >= first.drawn


def test_a_batch_is_divided_over_the_shards():
    engine = full(100, shards=3, chunk=16)
    for n in range(6):
        engine.submit([n + 1] * (4 + n), 4, stream=n)
    plans = [engine.step() for _ in range(2)]
    assert [len(shard.draws) for shard in plans[1].shards] == [2, 2, 2]
    engine.run()


def test_a_request_begins_where_its_prefix_is_unless_much_is_to_do_there():
    """A sequence under way counts as a page, as does each page that would be read again."""
    engine = full(100, shards=2, slots=8, chunk=32, size=4)
    first = engine.submit(PROMPT, 2)  # 8 tokens fill pages
    engine.run()
    shards = []
    for stream in range(6):
        same = engine.submit(PROMPT, 40, stream=stream)
        engine.step()
        shards.append(same.shard)
    assert first.cached == 0 and shards[:3] == [0, 0, 0] and shards[3] == 1  # 3 others and 2 tokens, or 10 tokens
    assert abs(shards.count(0) - shards.count(1)) <= 2
    other = engine.submit([2, *PROMPT], 1)
    engine.step()
    assert other.shard == min((0, 1), key=shards.count)
    engine.run()
    for generation in (first, same, other):
        engine.check(generation)


def test_one_without_room_on_its_best_shard_begins_on_another():
    """And what gives way to a request of higher priority goes on elsewhere, where there is room."""
    engine = full(100, shards=2, slots=1, chunk=32)
    first = engine.submit(PROMPT, 9)
    engine.step()
    second = engine.submit(PROMPT, 9, stream=1)
    engine.step()
    assert (first.shard, second.shard, second.cached) == (0, 1, 0)
    waiting = engine.submit(PROMPT, 9)
    engine.step()
    assert waiting.shard == -1
    urgent = engine.submit([4] * 9, 3, priority=-1)
    engine.step()
    assert urgent.shard >= 0 and [each.preemptions for each in (first, second, urgent)].count(1) == 1
    engine.run()
    for generation in (first, second, waiting, urgent):
        engine.check(generation)


@pytest.mark.parametrize("options", [{"slots": 0}, {"tile": 9}, {"tile": 0}, {"max_queued": 0}, {"max_context": 0}])
def test_sizes_without_sense_are_refused(options):
    with pytest.raises(InputError, match="at least"):
        full(9, **options)


def test_as_many_run_together_as_the_pages_hold():
    """No page stays free for a generation that has pages for all its tokens already."""
    engine = full(5, size=4, slots=4, chunk=16)
    for n in range(4):
        engine.submit([n + 1] * 2, 3)
    engine.step()
    assert engine.scheduler.admitted == 4
    engine.run()
