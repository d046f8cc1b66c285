"""The speed of decoding, measured beside the time in which its bytes can be read."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    from jaxlm.api.model import LoadedModel


class DecodeSpeed(NamedTuple):
    """The measured speed of decoding.

    Attributes:
      rows: sequences that draw together.
      context: tokens of each prompt.
      dtype: that is computed in.
      median_step_s: seconds of a step, in which each sequence draws a token, or with drafts several.
      step_s: seconds of a step, the mean of each block.
      read_bytes: the least bytes that a device reads in a step, as counted.
      read_s: seconds in which they can be read, by a sum over a large array.
      share_of_read_bound: `read_s` over `median_step_s`.
      steps_per_dispatch: the steps that one program runs.
      tokens_per_step, rows_per_step: of a sequence, the mean tokens that are drawn and rows that are read, a row of
        each draft; 1 without drafts.
      counted_speed_up: with drafts, by how much they raise the tokens in a second, if steps take the time to read their
        bytes, those of a draft model too: a draft reads the sequence's keys and values once more. 1 without drafts.
    """

    rows: int
    context: int
    dtype: str
    median_step_s: float
    step_s: list[float]
    tokens_per_s: float
    read_bytes: int
    read_s: float
    share_of_read_bound: float
    steps_per_dispatch: int
    tokens_per_step: float
    rows_per_step: float
    counted_speed_up: float


def bench_decode(
    model: "LoadedModel",
    rows: int,
    context: int,
    *,
    steps: int = 10,
    blocks: int = 12,
    bytes_per_s: float | None = None,
    text: "Sequence[int] | None" = None,
    progress: Callable[[str], AbstractContextManager] = nullcontext,
) -> DecodeSpeed:
    """Measure decoding: blocks of steps are timed after one that is not, and the median is taken.

    Args:
      model: as `load` returns it; it is measured with an engine of `rows` sequences of the length that is needed.
      rows: sequences.
      context: tokens of each prompt.
      text: the tokens of the prompts, one after the other; random ones where it is not given.
      steps: of a block; where a dispatch has more, each has one.
      bytes_per_s: the bandwidth of a sum over a large array; measured where it is not given.
      progress: takes what is being done, and returns a context for it.

    Raises InputError for sizes below 1, and where the sequences do not fit the model's context.
    """
    from jaxlm.costs.serving import draft_model_bytes, token_cost
    from jaxlm.inference.measured import decode_steps, read_bytes_per_s

    for name, size in {"rows": rows, "context": context, "steps": steps, "blocks": blocks}.items():
        if size < 1:
            raise InputError(f"{name} = {size} must be 1 or more")
    drafts = model.settings.drafts
    longest = context + (blocks + 1) * steps * (1 + drafts) + 1
    if longest > model.config.context_length:
        raise InputError(
            f"--context {context} and {longest - context} steps exceed model.context_length = "
            f"{model.config.context_length}; lower --context, --blocks or --steps"
        )
    bytes_per_s = bytes_per_s or read_bytes_per_s()
    settings, times, drawn, rows_read = model.settings, [], [], []
    model.set_engine(replace(settings, slots=rows, context=longest))
    try:
        with progress(f"{rows} sequences of {context} tokens"):
            runner = model.engine().runner
            if steps >= runner.programs.steps_of(runner.programs.shapes.decode[-1]):
                runner.warm_multi_step()
            together = runner.steps_of(rows)
            run = decode_steps(model.engine(), rows, context, (blocks + 1) * steps, text=text)
            for _ in range(blocks + 1):
                start = time.perf_counter()
                before = model.engine().drafted
                tokens = run(max(1, steps // together))
                ran = steps if drafts else tokens / rows
                drawn.append(tokens / (ran * rows))
                rows_read.append(1 + (model.engine().drafted - before) / (ran * rows))
                times.append((time.perf_counter() - start) / ran)
        dtype = str(model.engine().runner.programs.dtype)
        rows_with_drafts = round(rows * statistics.mean(rows_read[1:]))
        length = context + len(times) * steps // 2
        works = [model.decode_work(length, n) for n in (rows, rows_with_drafts)]
        of_draft_model = draft_model_bytes(model.drafting_work(length, rows), rows_with_drafts)
    finally:
        model.set_engine(settings)
    one, read_bytes = (token_cost(work, None).read_bytes // work.layout.size for work in works)  # of one device
    tokens, read_bytes = statistics.mean(drawn[1:]), read_bytes + of_draft_model
    step_s, read_s = statistics.median(times[1:]), read_bytes / bytes_per_s
    return DecodeSpeed(
        rows=rows,
        context=context,
        dtype=dtype,
        median_step_s=step_s,
        step_s=times[1:],
        tokens_per_s=rows * tokens / step_s,
        read_bytes=read_bytes,
        read_s=read_s,
        share_of_read_bound=read_s / step_s,
        steps_per_dispatch=together,
        tokens_per_step=tokens,
        rows_per_step=statistics.mean(rows_read[1:]),
        counted_speed_up=tokens * one / read_bytes,
    )
