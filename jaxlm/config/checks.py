"""The checks of an experiment that involve several of its sections."""

from jaxlm.config.experiment import Experiment
from jaxlm.config.mesh_layout import check_layout
from jaxlm.config.step_sizes import SIZE_KEYS, sizes
from jaxlm.core.errors import InputError
from jaxlm.data.config import BYTES_VOCABULARY
from jaxlm.parallel.layout_choice import some_divisors
from jaxlm.parallel.rules import TRAIN, Kind


def check_experiment(experiment: Experiment, kind: Kind) -> None:
    """Check what involves several sections. Raises InputError."""
    model, training = experiment.model, experiment.training
    if experiment.dpo is not None and not experiment.data.of_preferences:
        raise InputError("[dpo] is an objective for data.preferences, which are not given; give them or leave it out")
    if experiment.dpo is not None and training.z_loss:
        raise InputError(f"training.z_loss = {training.z_loss} is no part of [dpo]; leave it out")
    if (objective := experiment.objective.kind) != "next_token" and (experiment.dpo is not None or training.z_loss):
        other = "[dpo]" if experiment.dpo is not None else f"training.z_loss = {training.z_loss}"
        raise InputError(f"{other} is no part of objective.kind = {objective!r}; leave either out")
    _, sequence = sizes(experiment, kind or "train")
    if sequence > model.context_length:
        raise InputError(
            f"{SIZE_KEYS[kind or 'train'][1]} = {sequence} is longer than model.context_length = "
            f"{model.context_length}; lower it"
        )
    context = experiment.inference.context
    if kind in ("prefill", "decode") and context is not None and sequence > context:
        raise InputError(
            f"{SIZE_KEYS[kind][1]} = {sequence} is longer than inference.context = {context}; lower it, or raise the "
            "context"
        )
    staged = experiment.mesh.least().over(TRAIN.over("layers")) > 1 and experiment.execution.pipeline_rounds > 1
    if kind == "train" and training.batch % training.microbatches and not staged:  # see `check_layout`
        raise InputError(
            f"training.microbatches = {training.microbatches} does not divide training.batch = {training.batch}: "
            f"set it to one of {some_divisors(training.batch)}"
        )
    kept = () if isinstance(experiment.execution.remat, str) else experiment.execution.remat
    if unknown := [name for name in kept if name not in model.activations]:
        raise InputError(
            f"execution.remat keeps {', '.join(unknown)}, which no layer of the model has; what it can keep is "
            f"{', '.join(model.activations)}"
        )
    if kind == "train":
        check_layout(experiment, experiment.mesh.least())
        if training.local_sgd is not None:
            _check_local_sgd(experiment)


def _check_local_sgd(experiment: Experiment) -> None:
    """Raise InputError for what replicas that train by themselves do not do."""
    if experiment.training.ema_decay is not None:
        raise InputError(
            "training.ema_decay averages the parameters of each step, of which training.local_sgd has several: leave "
            "either out"
        )
    if experiment.records.norms_every is not None:
        raise InputError("records.norms_every looks at one model, and training.local_sgd trains several: leave it out")


def check_context(experiment: Experiment) -> None:
    """Raise InputError where sequences of the engine may be longer than the model's."""
    context, longest = experiment.inference.context, experiment.model.context_length
    if context is not None and context > longest:
        raise InputError(f"inference.context = {context} is longer than model.context_length = {longest}; lower it")


def check_state_interval(experiment: Experiment) -> None:
    """Raise InputError for states to be kept that no layer has, or that are not at the ends of pages."""
    interval, page = experiment.inference.state_interval, experiment.inference.page
    if interval is None:
        return
    if not any(block.attention.carries_states for block in experiment.model.layers):
        raise InputError(
            f"inference.state_interval = {interval} is of recurrent layers, and this model has none; leave it out"
        )
    if interval % page:
        raise InputError(
            f"inference.state_interval = {interval} must be a multiple of inference.page = {page}, such as "
            f"{-(-interval // page) * page}"
        )


def check_quantized(experiment: Experiment, kind: Kind = "train") -> None:
    """Raise InputError where a step would train matrices that are quantised, or would round activations."""
    quantize = experiment.execution.quantize
    if kind == "train" and quantize != "none" and experiment.lora is None:
        raise InputError(
            f'execution.quantize = "{quantize}" is of weights that are not trained: add [lora], which trains adapters '
            'beside them, or set execution.quantize = "none"'
        )
    if kind == "train" and quantize == "w8a8":
        raise InputError(
            'execution.quantize = "w8a8" rounds activations too, which is for inference alone: train adapters beside '
            'the same weights with "int8"'
        )


def check_new_tokenizer(experiment: Experiment) -> None:
    """Raise InputError where the model has fewer ids than the tokenizer that is made for it."""
    tokenizer, vocabulary = experiment.data.tokenizer, experiment.model.vocab_size
    if tokenizer in ("bytes", "bpe") and vocabulary < BYTES_VOCABULARY:
        raise InputError(
            f'data.tokenizer = "{tokenizer}" has at least {BYTES_VOCABULARY} tokens, more than model.vocab_size = '
            f"{vocabulary}; set model.vocab_size={BYTES_VOCABULARY}, or data.tokenizer to a file"
        )
