"""Compare the story of a small published model in fewer bits with the one in float32, at temperature 0.

    python benchmarks/stories_widths.py

For each width of matrices and of keys and values, counts the bytes of the story before the first that differs. Results
depend on the processor, whose sums in another order may decide between two tokens that are equally likely.
"""

import itertools
import json
import os
from pathlib import Path

import results

from jaxlm import api

STORIES = Path(__file__).parents[1] / "tests" / "families" / "stories260K"


def main() -> None:
    first, *others = json.loads((STORIES / "stories260K_tokens.json").read_text())["tokens"]

    def story(matrices: str, pages: str | None) -> bytes:
        settings = [f"execution.quantize={matrices}", *[f"inference.cache_dtype={pages}"] * bool(pages)]
        model = api.load(STORIES, settings, dtype="float32")
        (text,) = model.generate([[first]], max_tokens=len(others), temperature=0)
        return text.text.encode()

    whole, rows = story("none", None), []
    for matrices, pages in itertools.product(("none", "int8", "w8a8", "int4", "fp8"), (None, "int8", "fp8")):
        equal = len(os.path.commonprefix([whole, story(matrices, pages)]))
        rows.append({"matrices": matrices, "pages": pages or "float32", "equal_bytes": equal})
        print(f"matrices {matrices}, pages {pages or 'float32'}: {equal} of {len(whole)} bytes")
    print(results.write("stories_widths", results.cpu(), {"bytes": len(whole), "rows": rows}))


if __name__ == "__main__":
    main()
