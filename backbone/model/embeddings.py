"""Everything that enters the network: token ids, picture features, scale sums, audio frames."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.layout import MAX_SCALES
from ernie5.backbone.rows import RowBatch
from ernie5.protocol.vocabulary import UnifiedVocabulary


class FeatureMerger(nn.Module):
    """K neighbouring patches of each named encoder to one vector (ERNIE 5.0 report, section 2.2.2).

    Project every encoder to one width, that of the semantic encoder ``vit`` where there is one, and lay the
    patches of all encoders side by side (2K items for two); let the items of a token attend to one another,
    average them, project to the backbone. With one encoder the items are its K patches.
    """

    def __init__(self, features: dict[str, int], width: int) -> None:
        super().__init__()
        inner = features.get("vit", max(features.values()))
        self.heads = next(heads for heads in (4, 2, 1) if inner % heads == 0)
        self.names = tuple(features)
        self.project = nn.ModuleDict({name: nn.Linear(size, inner) for name, size in features.items()})
        self.place = nn.ParameterDict({name: torch.zeros(64, inner) for name in features})
        self.norm = nn.LayerNorm(inner)
        self.qkv = nn.Linear(inner, 3 * inner, bias=False)
        self.mix = nn.Linear(inner, inner, bias=False)
        self.out_norm = nn.LayerNorm(inner)
        self.out = nn.Linear(inner, width)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Per encoder ``[M, K, D]`` to ``[M, width]``."""
        items = torch.cat(
            [
                self.project[name](features[name]) + self.place[name][: features[name].shape[1]]
                for name in self.names
            ],
            1,
        )
        q, k, v = self.qkv(self.norm(items)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        items = items + self.mix(mixed)
        return self.out(self.out_norm(items.mean(1)))


class Embeddings(nn.Module):
    """The input side of the backbone."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        vocabulary = UnifiedVocabulary(config.text_vocabulary)
        self.width = config.width
        self.token = nn.Parameter(torch.empty(vocabulary.size, config.width))
        self.scale_value = nn.Linear(config.bits, config.width)
        self.scale_index = nn.Parameter(torch.empty(MAX_SCALES, config.width))
        self.audio = nn.Parameter(torch.empty(config.audio_levels, config.audio_codebook, config.width))
        self.merger = FeatureMerger(config.features, config.width)
        sound_width = sum(config.sound_features.values())
        self.sound_features = nn.Linear(sound_width, config.width, bias=False) if sound_width else None

    def forward(self, batch: RowBatch) -> Tensor:
        """float32 ``[B, N, d]``; padding is zero."""
        rows, length = batch.shape
        x = torch.zeros(rows * length, self.width, device=self.token.device)
        x = x.index_copy(0, batch.token_at, F.embedding(batch.token, self.token))
        if len(batch.feature_at):
            x = x.index_copy(0, batch.feature_at, self.merger(batch.features))
        if len(batch.scale_at):
            x = x.index_copy(0, batch.scale_at, self.scales(batch.scale_values, batch.scale_index))
        if len(batch.frame_at):
            x = x.index_copy(0, batch.frame_at, self.sound(batch.frames, batch.frame_features))
        return x.view(rows, length, -1)

    def scales(self, values: Tensor, index: Tensor) -> Tensor:
        """Accumulated scales ``[c, bits]`` and their scale's number to ``[c, d]``."""
        return self.scale_value(values * values.shape[-1] ** 0.5) + self.scale_index[index]

    def sound(self, codes: Tensor, features: Tensor | None = None) -> Tensor:
        """Frames ``[f, Q]`` to the sum over levels of level-specific embeddings, ``[f, d]``.

        ``features`` ``[f, D]`` of understood frames are projected and added; generated ones have none.
        """
        levels, size, width = self.audio.shape
        flat = codes + torch.arange(levels, device=codes.device) * size
        x = F.embedding(flat, self.audio.view(levels * size, width)).sum(1)
        if self.sound_features is not None and features is not None:
            x = x + self.sound_features(features)
        return x
