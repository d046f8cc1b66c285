"""Latency and throughput of an engine under a load of requests, from the seconds of its steps: a queueing estimate.

All requests have prompts of one length and draw one number of tokens. A step draws a token for each sequence that
decodes, and reads prompts in the order in which they came, up to its rows for them (`jaxlm.inference.scheduler`).

- Prompts wait for one server. A step that reads none is a vacation of it: it ends before a prompt that has come is
  read. The wait is that of an M/G/1 queue with vacations (Bertsekas and Gallager, Data Networks, 2nd edition, 1992,
  section 3.5.2): λ E[X²] / (2 (1 − ρ)) + E[V²] / (2 E[V]), where each prompt has the same X and each step the same V.
- Decoding sequences share the steps: processor sharing, in which each of n sequences gets a token every t(n) seconds,
  or with drafts the expected tokens of a step.
  The number of sequences does not depend on how their lengths are distributed (Cohen 1979, "The multiple phase service
  network with generalized processor sharing", Acta Informatica 12): it is that of a birth-death chain. Where all slots
  are taken, requests wait as in M/M/c, with the rate of c sequences.
- Without a rate, each of N clients sends a request as soon as the one before is answered. That is a closed network;
  its throughput is from mean value analysis (Reiser and Lavenberg 1980, JACM 27) with Schweitzer's approximation: a
  request meets (N − 1) / N of the mean queue.

Assumed: Poisson arrivals, no prompt shares a prefix with another, none is preempted, a step's seconds grow linearly
with the sequences that decode. Not counted: the server's own time for a request (HTTP, tokens to text).
"""

import math
from typing import NamedTuple

_TENTH = 0.1  # of the requests wait longer than the 90th percentile


class StepSeconds(NamedTuple):
    """Seconds of an engine's steps: of one that reads no prompt (`decode`), of one that does (`mixed`), each while no
    sequence decodes, and `each` more for every sequence that does."""

    decode: float
    mixed: float
    each: float


class EngineLoad(NamedTuple):
    """An engine, and the requests that it serves.

    Attributes:
      slots: the most sequences that are under way.
      seconds: of the steps.
      prompt_steps: steps that read a prompt, if it is alone.
      prompt_work: steps' worth of rows that a prompt takes; prompts share a step where it is not a whole number.
      output: tokens that a request draws, the first of them by the last step of its prompt.
      tokens: expected tokens that a step draws for a sequence that decodes, more than one where drafts are read.
    """

    slots: int
    seconds: StepSeconds
    prompt_steps: int
    prompt_work: float
    output: int
    tokens: float = 1.0

    @property
    def later_steps(self) -> float:
        """The steps in which a request draws the tokens after its first."""
        return (self.output - 1) / self.tokens

    def decoding_s(self, sequences: float) -> float:
        """Return the seconds of a step that reads no prompt."""
        return self.seconds.decode + self.seconds.each * sequences

    def mixed_s(self, sequences: float) -> float:
        """Return the seconds of a step that reads prompts."""
        return self.seconds.mixed + self.seconds.each * sequences

    def share_mixed(self, per_step: float) -> float:
        """Return the share of steps that read prompts, if so many requests arrive in each step: as many as their rows
        fill, or, where prompts share steps, those in which a prompt arrives."""
        return min(1.0, max(per_step * self.prompt_work, -math.expm1(-per_step * self.prompt_steps)))

    def mean_s(self, sequences: float, share: float) -> float:
        """Return the mean seconds of steps of which this share reads prompts."""
        return (1 - share) * self.decoding_s(sequences) + share * self.mixed_s(sequences)


class Service(NamedTuple):
    """The service that requests get.

    Attributes:
      rate: requests a second.
      ttft, ttft_p90: seconds to the first token: mean, and what nine of ten requests stay below.
      tpot: mean seconds of each later token; 0 if there is none.
      decoding: the mean number of sequences that decode.
      mixed: the share of steps that read prompts.
    """

    rate: float
    ttft: float
    ttft_p90: float
    tpot: float
    decoding: float
    mixed: float


def with_clients(load: EngineLoad, clients: int) -> Service:
    """Return the service of a number of clients, at most as many as slots, each of which always has one request under
    way."""
    later, others = load.later_steps, (clients - 1) / clients

    def wait(per_step: float) -> float:
        """Return the steps for which a prompt waits for others, if so many requests begin in each step."""
        busy = others * per_step * load.prompt_work
        return math.inf if busy >= 1 else busy * load.prompt_work / (2 * (1 - busy))

    slow, fast = 0.0, clients / (load.prompt_steps + later)
    for _ in range(60):  # bisection
        middle = (slow + fast) / 2
        slow, fast = (middle, fast) if middle * (load.prompt_steps + wait(middle) + later) < clients else (slow, middle)
    per_step = min(slow, 1 / load.prompt_work)
    share, decoding = load.share_mixed(per_step), min(per_step * later, clients)
    reading = max(clients / per_step - later, load.prompt_steps)  # steps, those of waiting among them; by Little's law
    mixed_s = load.mixed_s(decoding)
    busy = min(1.0, others * per_step * load.prompt_work)
    waited = min(_tail(reading - load.prompt_steps, busy), (clients - 1) * load.prompt_work)
    return Service(
        per_step / load.mean_s(decoding, share),
        reading * mixed_s,
        (load.prompt_steps + waited) * mixed_s,
        load.mean_s(1 + others * decoding, load.share_mixed(others * per_step)) / load.tokens if later else 0.0,
        decoding,
        share,
    )


def at_rate(load: EngineLoad, rate: float) -> Service | None:
    """Return the service of requests that arrive at this rate a second; None where they would queue without end."""
    later = load.later_steps

    def mean_s(sequences: float) -> float:
        before, seconds = 0.0, load.decoding_s(sequences)
        while seconds > 1.0001 * before:  # it grows, up to that of steps which all read prompts
            before, seconds = seconds, load.mean_s(sequences, load.share_mixed(rate * seconds))
        return seconds

    def in_slot_s(sequences: float) -> float:
        return load.prompt_steps * load.mixed_s(sequences) + later * mean_s(sequences)

    # The birth-death chain of sequences that have a slot, and of requests that wait for one.
    weights = [1.0]
    for n in range(1, load.slots + 1):
        weights.append(weights[-1] * rate * in_slot_s(n) / n)
        if weights[-1] > 1e200:  # only ratios count
            weights = [weight / 1e200 for weight in weights]
    busy = rate * in_slot_s(load.slots) / load.slots
    if busy >= 1:
        return None
    beyond = weights[-1] * busy / (1 - busy)
    whole = sum(weights) + beyond
    all_taken = (weights[-1] + beyond) / whole
    slot_wait = weights[-1] * busy / (1 - busy) ** 2 / whole / rate
    sequences = (sum(n * weight for n, weight in enumerate(weights)) + load.slots * beyond) / whole

    decoding = rate * later * mean_s(sequences)
    mixed_s, step_s = load.mixed_s(decoding), load.decoding_s(decoding)
    prompt_s = load.prompt_work * mixed_s
    if (reading := rate * prompt_s) >= 1:
        return None
    queue = reading * prompt_s / (2 * (1 - reading))
    share = load.share_mixed(rate * mean_s(decoding))
    # The step in progress; where a prompt takes several steps, those of earlier prompts are in the queue.
    current_s = step_s if load.prompt_work >= 1 else (1 - share) * step_s + share * mixed_s
    is_busy = 1 - weights[0] / whole
    alone = load.prompt_steps * mixed_s
    wait_p90 = 2 * (1 - _TENTH) * is_busy * current_s / 2 + _tail(queue, reading) + _tail(slot_wait, all_taken)
    return Service(
        rate,
        alone + is_busy * current_s / 2 + queue + slot_wait,
        alone + wait_p90,
        (sequences / rate - alone) / (load.output - 1) if later else 0.0,
        decoding,
        share,
    )


def _tail(mean: float, probability: float) -> float:
    """Return the 90th percentile of a wait with this mean that occurs with this probability, and then is exponential,
    as in M/M/1 and M/M/c."""
    return mean / probability * math.log(probability / _TENTH) if probability > _TENTH else 0.0
