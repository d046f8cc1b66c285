"""Figures of a load, under the names that vLLM's benchmark gives them. Imports no JAX.

Times of a request count from when it is sent. TTFT is until the first part of its text; ITL are the gaps between parts;
E2EL is until its end; TPOT is (E2EL - TTFT) / (tokens - 1).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlm.server.load.client import Answered

METRICS = ("ttft", "tpot", "itl", "e2el")
_PERCENTILES = (90, 99)


def figures(
    answered: Sequence[Answered], failed: int, duration_s: float, goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of the requests that have their text.

    Args:
      failed: the number of requests without a text.
      duration_s: from the first request to the end of the last.
      goodput: the most milliseconds of metrics, which a good request has: of all of its gaps for `itl`.
    """
    input_tokens, drawn = (sum(getattr(each, name) for each in answered) for name in ("prompt_tokens", "output_tokens"))
    values: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(answered),
        "failed": failed,
        "total_input_tokens": input_tokens,
        "total_output_tokens": drawn,
        "request_throughput": len(answered) / duration_s,
        "output_throughput": drawn / duration_s,
        "total_token_throughput": (input_tokens + drawn) / duration_s,
        "steady_output_throughput": _steady(answered),
        "mean_concurrency": sum(each.ended - each.sent for each in answered) / duration_s,
    }
    times = [_times(each) for each in answered]
    if goodput:
        good = sum(all(max(each[name], default=0.0) <= most for name, most in goodput.items()) for each in times)
        values["request_goodput"] = good / duration_s
    for name in METRICS:
        all_ms = [ms for each in times for ms in each[name]]
        values |= {f"{kind}_{name}_ms": value for kind, value in _statistics(all_ms).items()}
    return values


def _times(answered: Answered) -> dict[str, list[float]]:
    """Return the milliseconds of a request by metric; of `itl` all, of other metrics one or none."""
    to_first, to_end = (
        1e3 * (at - answered.sent) for at in (answered.chunks or (answered.ended,))[:1] + (answered.ended,)
    )
    after = answered.output_tokens - 1
    return {
        "ttft": [to_first],
        "tpot": [(to_end - to_first) / after] if after > 0 else [],
        "itl": (1e3 * np.diff(answered.chunks)).tolist(),
        "e2el": [to_end],
    }


def _statistics(values: Sequence[float]) -> dict[str, float | None]:
    names = ("mean", "median", "std", *(f"p{percent}" for percent in _PERCENTILES))
    if not values:
        return dict.fromkeys(names)
    percentiles = np.percentile(values, [50, *_PERCENTILES])
    found = [np.mean(values), percentiles[0], np.std(values), *percentiles[1:]]
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def _steady(answered: Sequence[Answered]) -> float | None:
    """Return the output tokens a second between the first end of a request and the last beginning of one: without what
    fills the server and what empties it. None where these are the other way round."""
    if not answered:
        return None
    begin, end = min(each.ended for each in answered), max(each.sent for each in answered)
    if end <= begin:
        return None
    tokens = sum(
        each.output_tokens * sum(begin < at <= end for at in each.chunks) / len(each.chunks)
        for each in answered
        if each.chunks
    )
    return tokens / (end - begin)
