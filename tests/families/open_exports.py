"""Open what jaxlm exports in transformers, and hold its logits against the fixtures.

Two steps, in two environments, since transformers is no dependency of jaxlm:

    python tests/families/open_exports.py write FOLDER      (where jaxlm is installed)
    VENV/bin/python tests/families/open_exports.py read FOLDER --results benchmarks/results/exports/NAME.json

The first writes a Hugging Face directory of each fixture's loud weights, with a config.json of jaxlm's own making. The
second opens each in transformers (`make_fixtures.py` says how to install it). It fails at a Python warning, a tensor
that is missing or left over, or a logit off by more than 2e-5 of the largest.
"""

import argparse
import json
import warnings
from pathlib import Path

import loud
import numpy as np

TOLERANCE = 2e-5


def write(folder: Path) -> None:
    """Write the exports."""
    import tempfile

    import jax
    from running import save

    from jaxlm.families import directory
    from jaxlm.families.directory import PublishedModel
    from jaxlm.families.settings import config_of
    from jaxlm.parallel.layout import Layout
    from jaxlm.parallel.mesh import make_mesh
    from jaxlm.parallel.rules import TRAIN

    mesh = make_mesh(Layout(), jax.devices()[:1])
    for name in loud.names():
        facts, _ = loud.read(name)
        with tempfile.TemporaryDirectory() as there:
            model = PublishedModel(save(Path(there), facts["config"], loud.weights(facts, "loud")))
            ours = config_of(model.model, model.family) | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
            kept = {"config.json": json.dumps(ours | {"dtype": "float32", "torch_dtype": "float32"}).encode()}
            parameters = model.load(mesh, TRAIN, "float32")
            directory.write(folder / name, model.model, parameters, model.dtypes(), kept, lambda line: None)


def read(folder: Path) -> dict[str, object]:
    """Open the exports. Return the largest error of each, relative to the largest logit; None for a family that this
    transformers does not have."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    errors: dict[str, float | None] = {}
    for name in loud.names():
        facts, arrays = loud.read(name)
        if facts["config"]["model_type"] not in CONFIG_MAPPING:
            errors[name] = None
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, info = AutoModelForCausalLM.from_pretrained(
                folder / name, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        assert not any(info.values()), (name, info)
        with torch.no_grad():
            logits = model(torch.tensor(facts["sequences"])).logits.numpy()[:, facts["positions"]]
        errors[name] = error = float(np.abs(logits - arrays["loud"]).max() / facts["largest"]["loud"])
        assert error <= TOLERANCE, (name, error)
    return {"transformers": transformers.__version__, "torch": torch.__version__, "errors": errors}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("write", "read"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    if asked.step == "write":
        write(asked.folder)
    else:
        found = read(asked.folder)
        print(json.dumps(found, indent=1))
        if asked.results:
            asked.results.parent.mkdir(parents=True, exist_ok=True)
            asked.results.write_text(json.dumps(found, indent=1) + "\n")
