"""Write the fixtures of the model families: what transformers computes for tiny models with loud and quiet weights.

Runs in an environment of its own, with nothing of this repository installed, and downloads nothing:

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 transformers==5.24.0 numpy safetensors
    VENV/bin/python tests/families/make_fixtures.py [NAME …]

Each family gets `fixtures/NAME.json` (the config as transformers writes it, the names and shapes on disk, tokens,
noise and tolerance) and `fixtures/NAME.npz` (logits and gradient probes). Two runs write the same bytes.

The weights come from `loud.py`. They are written under the names that `save_pretrained` uses, read back with
`from_pretrained`, and so pass through its conversion. References are float64 throughout, rounded to float32: models in
transformers name float32 in norms, softmax and rotary tables, which `model.double()` leaves as they are, so here that
name means float64 while a reference is computed.

A router's choice jumps where two experts, or two groups of them, nearly tie. So tokens are drawn again until no choice
in any layer is closer than TIE (of what follows a prompt: than TIE / 10).

JSON keys:
    config              config.json as transformers 5 writes it
    old_config          the same in the spelling of transformers 4, which gives the same float32 logits bit by bit
    weights             the arguments of `loud.tensor` for this family
    tensors             name on disk -> shape
    dtype               of all tensors on disk
    parameters          sum of the sizes of the tensors, but for those that no gradient moves
    sequences           two token sequences of equal length
    positions           positions of each sequence whose logits are stored
    packed              documents that share a row, and the stored positions of that row; positions restart at 0
                        and attention stays within a document, so each has the logits that it has alone. null where
                        each length has its own rope.
    short               number of tokens of each sequence in a second, shorter run; null except where rope depends on
                        the length
    greedy              a prompt, the tokens that follow by argmax under loud weights, the smallest difference of the
                        two largest logits, relative to the largest |logit|, and the steps whose logits are stored.
                        null where each length has its own rope.
    largest             max |logit| over all positions of the sequences, by variant
    noise               max difference of float32 and float64 logits relative to `largest`, by variant; `gradients`:
                        largest relative L2 difference of a tensor's gradients
    tolerance           largest admissible error relative to `largest`
    gradient_tensors    tensors in the order of the array `gradients`; only for one family of each norm placement

Arrays, all float32 and, but for `quiet`, under loud weights:
    loud, quiet         [sequence, position, vocabulary]
    packed              [position, vocabulary]
    short               [sequence, position, vocabulary], the last three positions
    greedy              [step, vocabulary]
    gradients           [tensor, 1 + PROBES]: the L2 norm of a tensor's gradients and their products with PROBES vectors
                        `loud.normals(f"{name} probe {i}", shape)`; the gradients of
                        sum(logits * loud.normals("cotangent", logits.shape)) over both sequences
"""

import contextlib
import json
import math
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import loud  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from tiny_configs import (  # noqa: E402
    FAMILIES,
    GRADIENTS,
    LENGTH_DEPENDENT,
    MIXES_DOCUMENTS,
    PATH_DEPENDENT,
    RECURRENT,
    WEIGHTS,
    old_spelling,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

LIMIT_BYTES = 40 * 1024
LENGTH = 47  # more than six windows, and more than twice the original lengths
POSITIONS = [0, 1, 6, 7, 8, 15, 16, 20, 21, 33, 45, 46]  # around the windows and the original lengths, and the end
DOCUMENTS = (21, 25)  # both beyond the original lengths
PACKED_POSITIONS = [0, 7, 20, 21, 28, 37, 45]
# Of families with recurrent layers, which read chunks of 64 tokens: three and a part of one, in which documents begin
# on the first, the second and the last token of a chunk.
CHUNK_DOCUMENTS = (64, 65, 62, 9)
CHUNK_POSITIONS = [0, 63, 64, 65, 66, 127, 128, 129, 130, 190, 191, 192, 199]
SHORT = 16  # the longest that is within the original lengths
PROMPT = 22
PROMPTS = 16  # candidates
GREEDY = 64
GREEDY_STEPS = [0, 31, 63]  # whose logits are stored
PROBES = 4
TOLERANCE = 2e-5
SAFE_MARGIN = 100  # times the noise
TIE = 1e-4  # of two scores: a hundred times what float32 leaves open

FLOAT32 = torch.float32


class NoFloat32(TorchDispatchMode):
    """Refuses results in float32."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor) and value.dtype == FLOAT32:
                raise TypeError(f"{function} computes in float32")
        return result


@contextlib.contextmanager
def float64_arithmetic():
    """Let the name float32 mean float64, and refuse float32 results."""
    single, method = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        with NoFloat32():
            yield
    finally:
        torch.float32 = torch.float = single
        torch.Tensor.float = method
        torch.set_default_dtype(single)


class Reference:
    """A tiny model of a family with loud or quiet weights, in float32 as read from disk, and in float64.

    Args:
        model_type: The family, as config.json names it.
        settings: The keys of its configuration.
        weights: The arguments of `loud.tensor`.
        variant: "loud" or "quiet".
    """

    def __init__(self, model_type: str, settings: dict, weights: dict, variant: str):
        config = AutoConfig.for_model(model_type, **settings)
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            self.config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            with safe_open(Path(folder) / "model.safetensors", "np") as file:
                self.tensors = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
                dtypes = {file.get_slice(name).get_dtype() for name in self.tensors}
            if dtypes != {"F32"}:
                raise ValueError(f"{model_type} has tensors of {dtypes}")
            self.weights = loud.weights({"tensors": self.tensors, "weights": weights}, variant)
            self.model = self.with_config(self.config)
        self.state = {key: value.double() for key, value in self.model.state_dict().items()}

    def with_config(self, config: dict):
        """Return the float32 model that a directory with this config.json and the weights is read as."""
        with tempfile.TemporaryDirectory() as folder:
            save_file(self.weights, Path(folder) / "model.safetensors", {"format": "pt"})
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            return self.load(folder)

    @staticmethod
    def load(folder: str | Path):
        """Return the float32 model of a directory, whose every tensor has a place and every place a tensor."""
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=FLOAT32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
        )
        if any(report.values()):
            raise ValueError(f"{folder} does not load as written: {report}")
        return model.eval()

    def double(self):
        """Return the model in float64, its rotary tables and constants computed in float64; inside its context."""
        model = AutoModelForCausalLM.from_config(
            self.model.config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        model.load_state_dict(self.state)
        return model

    def logits(self, rows: list[list[int]], exact: bool = True, **inputs) -> np.ndarray:
        """Return logits [row, position, vocabulary] of full passes without a cache."""
        with torch.no_grad(), float64_arithmetic() if exact else contextlib.nullcontext():
            # Rope that depends on the length remembers the longest row, so exact models are made anew.
            model = self.double() if exact else self.model
            return model(torch.tensor(rows), use_cache=False, **inputs).logits.numpy()

    def closest(self, rows: list[list[int]]) -> float:
        """Return the smallest difference between the last score that a router chooses and the next; 1 without any."""
        found, topk = [1.0], torch.topk

        def noted(scores, k, *arguments, **options):
            if k < scores.shape[-1]:
                last, following = topk(scores, k + 1).values[..., -2:].unbind(-1)
                found.append((last - following).min().item())
            return topk(scores, k, *arguments, **options)

        with contextlib.ExitStack() as stack:
            torch.topk = noted
            stack.callback(setattr, torch, "topk", topk)
            self.logits(rows)
        return min(found)

    def gradients(self, rows: list[list[int]], exact: bool = True) -> dict[str, np.ndarray]:
        """Return the gradients of the product of the logits with the fixed cotangent, by name on disk."""
        with float64_arithmetic() if exact else contextlib.nullcontext():
            model = self.double() if exact else self.model
            logits = model(torch.tensor(rows), use_cache=False).logits
            cotangent = torch.tensor(loud.normals("cotangent", tuple(logits.shape)), dtype=logits.dtype)
            model.zero_grad()
            (logits * cotangent).sum().backward()
            with torch.no_grad():
                for value in model.parameters():
                    value.copy_(value.grad)
        with tempfile.TemporaryDirectory() as folder:  # named on disk as the weights are
            model.save_pretrained(folder)
            return {
                name: value.astype(np.float64) for name, value in load_file(Path(folder) / "model.safetensors").items()
            }


def two_digits(value: float) -> float:
    """Round up to two significant digits, so that a last bit does not change a file."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.1e}")


def drawn(reference: Reference, key: str, count: int) -> list[int]:
    """Return the first draw of tokens without a near tie."""
    for attempt in range(1000):
        row = loud.tokens(key if attempt == 0 else f"{key} again {attempt}", count, 97)
        if reference.closest([row]) > TIE:
            return row
    raise ValueError(f"{key}: every draw has a near tie")


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def continuations(reference: Reference, name: str, count: int) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Return candidates of PROMPT tokens and `count` more by argmax, the margin of each choice and its logits.

    Each token comes from a full pass over all before it. A margin is the difference of the two largest logits, relative
    to the largest of all. Shapes are [candidate][token], [step, candidate] and [step, candidate, vocabulary].
    """
    rows = [loud.tokens(f"{name} prompt {i}", PROMPT, 97) for i in range(PROMPTS)]
    margins, largest, steps = [], [], []
    with torch.no_grad(), float64_arithmetic():
        model = reference.double()
        for _ in range(count):
            last = model(torch.tensor(rows), use_cache=False).logits[:, -1]
            first, second = torch.topk(last, 2).values.unbind(-1)
            margins.append((first - second).tolist())
            largest.append(last.abs().amax(-1).tolist())
            steps.append(last.numpy())
            rows = [[*row, token] for row, token in zip(rows, last.argmax(-1).tolist(), strict=True)]
    return rows, np.array(margins) / np.max(largest, 0), np.stack(steps)


def greedy(reference: Reference, name: str, noise: float) -> tuple[dict, np.ndarray]:
    """Return the most varied of the candidates whose every choice is safe from rounding, and logits of some steps."""
    rows, margins, steps = continuations(reference, name, GREEDY)
    smallest = margins.min(0)
    varied = [len(set(row[PROMPT:])) for row in rows]
    stops = np.array([reference.config["eos_token_id"] in row[PROMPT:] for row in rows])
    safe = (smallest > max(SAFE_MARGIN * noise, 25 * TOLERANCE)) & ~stops
    best = max(range(PROMPTS), key=lambda i: (safe[i], varied[i], -i))
    while safe[best] and reference.closest([rows[best]]) <= TIE / 10:
        safe[best] = False
        best = max(range(PROMPTS), key=lambda i: (safe[i], varied[i], -i))
    if not safe[best]:
        raise ValueError(f"{name}: no prompt is safe; the largest margin is {smallest.max()}")
    row = rows[best]
    facts = {"prompt": row[:PROMPT], "tokens": row[PROMPT:], "margin": float(f"{smallest[best]:.3g}")}
    return facts | {"steps": GREEDY_STEPS}, steps[GREEDY_STEPS, best]


def fixture(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the facts and arrays of one family."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "`rope_scaling` is deprecated", FutureWarning)  # the old spelling is on purpose
    logging.disable_progress_bar()
    arrays, largest, noise = {}, {}, {}
    references = {variant: Reference(*FAMILIES[name], WEIGHTS.get(name, {}), variant) for variant in loud.VARIANTS}
    sequences = [drawn(references["loud"], f"{name} sequence {i}", LENGTH) for i in range(2)]
    counts, packed_positions = (
        (CHUNK_DOCUMENTS, CHUNK_POSITIONS) if name in RECURRENT else (DOCUMENTS, PACKED_POSITIONS)
    )
    documents = [drawn(references["loud"], f"{name} document {i}", count) for i, count in enumerate(counts)]
    for variant in reversed(loud.VARIANTS):  # the loud reference stays
        reference = references[variant]
        old_config = old_spelling(name, reference.config)
        exact = reference.logits(sequences)
        arrays[variant] = exact[:, POSITIONS]
        largest[variant] = float(f"{np.abs(exact).max():.6g}")
        single = reference.logits(sequences, exact=False)
        noise[variant] = two_digits(relative(single, exact))
        with torch.no_grad():
            old_model = reference.with_config(old_config)
            if not np.array_equal(old_model(torch.tensor(sequences), use_cache=False).logits, single):
                raise ValueError(f"{name}: the old spelling of the config gives other logits")
    facts = {
        "family": name,
        "config": reference.config,
        "old_config": old_config,
        "weights": WEIGHTS.get(name, {}),
        "tensors": reference.tensors,
        "dtype": "F32",
        "parameters": sum(math.prod(shape) for key, shape in reference.tensors.items() if not loud.is_state(key)),
        "sequences": sequences,
        "positions": POSITIONS,
        "packed": None,
        "short": None,
        "greedy": None,
        "largest": largest,
        "noise": noise,
        "tolerance": TOLERANCE,
        "gradient_tensors": None,
    }
    if name not in PATH_DEPENDENT:
        apart = np.concatenate([reference.logits([document])[0] for document in documents])
        restarting = torch.cat([torch.arange(count) for count in counts])[None]
        together = reference.logits([sum(documents, [])], position_ids=restarting)[0]
        if (relative(together, apart) > 1e-9) != (name in MIXES_DOCUMENTS | RECURRENT):
            raise ValueError(f"{name}: transformers packs otherwise")
        arrays["packed"] = apart[packed_positions]
        facts["packed"] = {"documents": documents, "positions": packed_positions}
        facts["greedy"], arrays["greedy"] = greedy(reference, name, noise["loud"])
    if name in LENGTH_DEPENDENT:
        facts["short"] = SHORT
        arrays["short"] = reference.logits([sequence[:SHORT] for sequence in sequences])[:, -3:]
    if name in GRADIENTS:
        exact, single = reference.gradients(sequences), reference.gradients(sequences, exact=False)
        if exact.keys() != reference.tensors.keys():
            raise ValueError(f"{name} has other names in memory than on disk")
        facts["gradient_tensors"] = sorted(exact)
        arrays["gradients"] = np.array(
            [
                [np.linalg.norm(exact[key])]
                + [(exact[key] * loud.normals(f"{key} probe {i}", exact[key].shape)).sum() for i in range(PROBES)]
                for key in sorted(exact)
            ]
        )
        noise["gradients"] = two_digits(
            max(np.linalg.norm(single[key] - exact[key]) / np.linalg.norm(exact[key]) for key in exact)
        )
    return facts, {key: array.astype(np.float32) for key, array in arrays.items()}


def text(facts: dict) -> str:
    """Return JSON with one line for each key, and one for each entry of a config and of the tensors."""
    lines = []
    for key, value in facts.items():
        if key in ("config", "old_config", "tensors"):
            entries = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            lines.append(f"  {json.dumps(key)}: {{\n{entries}\n  }}")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main():
    for name in sys.argv[1:] or FAMILIES:
        facts, arrays = fixture(name)
        loud.FIXTURES.mkdir(exist_ok=True)
        files = [loud.FIXTURES / f"{name}.json", loud.FIXTURES / f"{name}.npz"]
        files[0].write_text(text(facts), encoding="utf-8")
        np.savez(files[1], **arrays)
        size = sum(file.stat().st_size for file in files)
        noise = "  ".join(f"{key} {value:.1e}" for key, value in facts["noise"].items())
        choice = facts["greedy"] or {"margin": math.nan, "tokens": []}
        print(
            f"{name:20s} {noise:44s} margin {choice['margin']:.1e} of {len(set(choice['tokens'])):2d} tokens  "
            f"largest {facts['largest']['loud']:6.2f} {facts['largest']['quiet']:6.3f}  {size / 1024:.1f} KB",
            flush=True,
        )
        if size > LIMIT_BYTES:
            raise ValueError(f"{name} takes {size} bytes; the limit is {LIMIT_BYTES}")


if __name__ == "__main__":
    main()
