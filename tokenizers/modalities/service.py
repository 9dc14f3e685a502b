"""One service's tokenizer with all modalities of that service: its own media, the codecs', the plug-ins'.

It has the face of a tokenizer (:class:`ernie5.tokenizers.base.Tokenizer`), so services need to know nothing
of codecs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ernie5.protocol.errors import ErnieMultiError, InvalidMediaError, UnsupportedMediaError
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import TokenSpan
from ernie5.tokenizers.base import Medium, Tokenizer
from ernie5.tokenizers.modalities.codec import Codec
from ernie5.tokenizers.modalities.registry import Registry, load_registry

if TYPE_CHECKING:
    from ernie5.tokenizers.text.dropout import BpeDropout

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class ServiceTokenizer:
    """``base`` and the codecs that build on it.

    Attributes:
        hash: the base's, which fixes the codecs' vocabulary too.
        modalities: the base's own, then the codecs'.
        content_types: the modality that a content type tells, where only one of the service claims it.
        base: the service's own tokenizer.
    """

    def __init__(self, base: Tokenizer, codecs: dict[str, Codec[Any]]) -> None:
        self.base = base
        self.hash: str = base.hash
        # A codec that wraps the base is of no use where the base lacks the modality (no weights for video).
        self._codecs = {
            name: codec
            for name, codec in codecs.items()
            if name not in base.modalities and not codec.wraps_base
        }
        self.modalities: tuple[str, ...] = (*base.modalities, *self._codecs)
        self.content_types = _unambiguous(
            {name: codec for name, codec in codecs.items() if name in self.modalities}
        )

    def encode_segments(
        self,
        segments: Sequence[Segment],
        *,
        features: bool = True,
        latent: bool = False,
        dropout: BpeDropout | None = None,
        positions: Sequence[int] | None = None,
    ) -> list[TokenSpan | ErnieMultiError]:
        """See :class:`~ernie5.tokenizers.base.Tokenizer`; codecs have no latent.

        ``dropout`` and ``positions`` are those of the text tokenizer; codecs are never cut by them.
        """
        places = [place for place, segment in enumerate(segments) if segment.modality not in self._codecs]
        own = [segments[place] for place in places]
        # Only text tokenizers know these two.
        draws: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
        if dropout is not None and positions is not None:
            draws["positions"] = [positions[place] for place in places]
        results = iter(
            self.base.encode_segments(own, features=features, latent=latent, **draws) if own else ()
        )
        return [
            self._guarded(segment.modality, partial(self._encode, segment, features))
            if segment.modality in self._codecs
            else next(results)
            for segment in segments
        ]

    def decode_spans(
        self, spans: Sequence[TokenSpan], *, content_type: str | None = None
    ) -> list[Medium | ErnieMultiError]:
        """See :class:`~ernie5.tokenizers.base.Tokenizer`."""
        own = [span for span in spans if span.modality not in self._codecs]
        results = iter(self.base.decode_spans(own, content_type=content_type) if own else ())
        return [
            self._guarded(span.modality, partial(self._decode, span, content_type))
            if span.modality in self._codecs
            else next(results)
            for span in spans
        ]

    def _encode(self, segment: Segment, features: bool) -> TokenSpan:
        try:
            data = segment.payload
        except ValueError as error:  # a reference not yet read, or a lone surrogate
            raise InvalidMediaError(f"{segment.modality}: {error}", param="data") from None
        codec = self._codecs[segment.modality]
        value = codec.read_checked(data, segment.content_type)
        return codec.encode(value, self.base, features=features)

    def _decode(self, span: TokenSpan, content_type: str | None) -> Medium:
        codec = self._codecs[span.modality]
        if content_type is not None and content_type.partition(";")[0].strip() == "text/plain":
            raise UnsupportedMediaError(
                f"{span.modality} becomes {' or '.join(codec.content_types)}, not text/plain",
                param="content_type",
            )
        return Medium(*codec.write_checked(codec.decode(span, self.base), content_type))

    @staticmethod
    def _guarded(modality: str, compute: Callable[[], Result]) -> Result | ErnieMultiError:
        """The result or its error; a codec that fails otherwise must not take a batch down."""
        try:
            return compute()
        except ErnieMultiError as error:
            return error
        except Exception as error:
            logger.exception("the codec of %s failed", modality)
            return ErnieMultiError(f"the codec of {modality} failed: {type(error).__name__}")


def with_modalities(service: str, base: Tokenizer, registry: Registry | None = None) -> ServiceTokenizer:
    """``base`` with the codecs of its service; plug-ins that can't be used are logged and left out."""
    registry = registry or load_registry()
    for problem in registry.problems.values():
        logger.warning("%s; left out", problem)
    return ServiceTokenizer(base, registry.of_service(service))


def _unambiguous(codecs: dict[str, Codec[Any]]) -> dict[str, str]:
    claims: dict[str, list[str]] = {}
    for name, codec in codecs.items():
        for content_type in codec.content_types:
            claims.setdefault(content_type, []).append(name)
    return {content_type: names[0] for content_type, names in claims.items() if len(names) == 1}
