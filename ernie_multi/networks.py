"""Which network a training run trains, the weights it begins with, and the tokenizers that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError

if TYPE_CHECKING:
    from ernie5.backbone.config import BackboneConfig
    from ernie5.backbone.model.transformer import Backbone


def network_of(
    preset_name: str | None,
    start_from: Path | None,
    checkpoint: Path | None,
    *,
    elastic: str | None = None,
    allocation: str | None = None,
    mean_experts: float | None = None,
) -> BackboneConfig:
    """The network of a run: of a preset (default ``mini``), a model folder or the checkpoint it goes on from.

    Args:
        elastic: which sub-networks training draws, one of :data:`~ernie5.backbone.elastic.options.DRAWS`.
        allocation: how many experts a token gets, one of :data:`~ernie5.backbone.elastic.options.POLICIES`.
        mean_experts: in the mean, for those that choose by need.

    Raises:
        InvalidInputError: an unknown name, values that don't fit the network, or another network than the
            checkpoint's.
    """
    from ernie5.backbone.config import preset
    from ernie5.backbone.elastic.options import with_allocation, with_draws
    from ernie5.backbone.training.checkpoint import read_config

    try:
        named = None if preset_name is None else preset(preset_name)
    except ValueError as error:
        raise InvalidInputError(str(error), param="preset") from None
    if named is not None and start_from is not None:
        raise InvalidInputError(
            f"a run begins with the network of preset {preset_name} or of {start_from}; give one of them",
            param="preset",
        )
    if checkpoint is not None:
        config, _ = read_config(checkpoint)
    elif start_from is not None:
        config, _ = read_config(start_from)
    else:
        config = named or preset("mini")
    known = config
    if elastic is not None:
        config = with_draws(config, elastic)
    if allocation is not None or mean_experts is not None:
        config = with_allocation(config, allocation, mean_experts)
    if checkpoint is not None and (config != known or (named is not None and named.name != known.name)):
        raise InvalidInputError(
            f"{checkpoint} was trained with another network or other options; leave preset, elastic, "
            "allocation and mean_experts out to go on with its own, or name another folder",
            param="out",
        )
    return config


def take_weights(model: Backbone, folder: Path) -> None:
    """Begin with a folder's weights; what only another allocation of experts has is left as it is.

    Raises:
        InvalidInputError: the folder's network is another one.
    """
    from ernie5.backbone.elastic.options import ALLOCATION_TENSORS
    from ernie5.backbone.training.checkpoint import load_model

    differing = model.load_state_dict(load_model(folder)[0].state_dict(), strict=False)
    for name in (*differing.missing_keys, *differing.unexpected_keys):
        if name.rpartition(".")[2] not in ALLOCATION_TENSORS:
            raise InvalidInputError(f"{folder} does not fit this network: {name} differs", param="init")


def check_start(folder: Path, hashes: dict[str, str]) -> None:
    """The tokenizers of a model folder to start from must be those that run, by service in ``hashes``.

    Raises:
        TokenizerMismatchError: one is another.
    """
    from ernie5.backbone.training.checkpoint import read_config

    _, tokenizers = read_config(folder)
    for service, expected in tokenizers.items():
        if hashes.get(service, expected) != expected:
            raise TokenizerMismatchError(
                f"{folder} belongs to {service} tokenizer {expected[:12]}, the services run "
                f"{hashes[service][:12]}; for text, name its model in ERNIE_MULTI_TEXT_MODEL"
            )


def check_resumed(out: Path, hashes: dict[str, str]) -> None:
    """Refuse to go on from the newest checkpoint in ``out`` with tokens of another meaning.

    Raises:
        TokenizerMismatchError: a tokenizer that it was trained with is not among ``hashes``, by service.
    """
    from ernie5.backbone.training.checkpoint import checkpoints, read_config

    for newest in checkpoints(out)[-1:]:
        _, known = read_config(newest)
        for service, expected in known.items():
            if hashes.get(service) != expected:
                raise TokenizerMismatchError(
                    f"{newest} was trained with {service} tokenizer {expected[:12]}, the run has "
                    f"{hashes.get(service, 'none')[:12]}; serve that tokenizer, or train into another folder"
                )
