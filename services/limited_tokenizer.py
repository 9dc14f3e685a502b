"""A tokenizer with the operator's limits on the size of media in front of it.

HTTP and the work stream both go through it, so that a medium is refused alike however it comes, before
anything of it is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ernie5.protocol.errors import ErnieMultiError, MediaTooLargeError
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import TokenSpan
from ernie5.tokenizers.base import Medium, Tokenizer

if TYPE_CHECKING:
    from ernie5.tokenizers.text.dropout import BpeDropout


class LimitedTokenizer:
    """``tokenizer``, refusing segments of more bytes than ``limits`` names for their modality.

    Attributes:
        hash, modalities, content_types: the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, limits: Mapping[str, int]) -> None:
        self._tokenizer, self._limits = tokenizer, dict(limits)
        self.hash: str = tokenizer.hash
        self.modalities: tuple[str, ...] = tokenizer.modalities
        self.content_types: Mapping[str, str] = getattr(tokenizer, "content_types", {})

    def encode_segments(
        self,
        segments: Sequence[Segment],
        *,
        features: bool = True,
        latent: bool = False,
        dropout: BpeDropout | None = None,
        positions: Sequence[int] | None = None,
    ) -> list[TokenSpan | ErnieMultiError]:
        """See :class:`~ernie5.tokenizers.base.Tokenizer`; ``dropout`` and ``positions`` are the text's."""
        problems = [self._problem(segment) for segment in segments]
        good = [segment for segment, problem in zip(segments, problems) if problem is None]
        # Only text tokenizers know these two.
        draws: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
        if dropout is not None and positions is not None:
            draws["positions"] = [place for place, problem in zip(positions, problems) if problem is None]
        results = iter(self._tokenizer.encode_segments(good, features=features, latent=latent, **draws))
        return [next(results) if problem is None else problem for problem in problems]

    def decode_spans(
        self, spans: Sequence[TokenSpan], *, content_type: str | None = None
    ) -> list[Medium | ErnieMultiError]:
        """See :class:`~ernie5.tokenizers.base.Tokenizer`."""
        return self._tokenizer.decode_spans(spans, content_type=content_type)

    def _problem(self, segment: Segment) -> MediaTooLargeError | None:
        limit = self._limits.get(segment.modality)
        size = payload_bytes(segment)
        if limit is None or size <= limit:
            return None
        return MediaTooLargeError(
            f"{segment.modality} of {size} bytes is above this service's limit of {limit} bytes; shrink or "
            "split it, or raise ERNIE_MULTI_SERVICE_LIMITS_BYTES",
            param="data" if segment.data is not None else "text",
        )


def payload_bytes(segment: Segment) -> int:
    """Bytes of a segment's medium: of its file, or of its text in UTF-8; 0 for a reference not yet read."""
    if segment.data is not None:
        return len(segment.data)
    # Lone surrogates are the tokenizer's to refuse.
    return len(segment.text.encode("utf-8", "surrogatepass")) if segment.text is not None else 0
