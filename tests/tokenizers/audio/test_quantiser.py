"""Residual quantisation: levels refine, training moves codebooks and revives unused codes."""

from __future__ import annotations

import torch

from ernie5.tokenizers.audio.quantiser import ResidualQuantiser


def clustered(count: int = 4000, dimension: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(20, dimension, generator=generator) * 3
    drawn = centres[torch.randint(20, (count,), generator=generator)]
    return (drawn + 0.3 * torch.randn(count, dimension, generator=generator)).T[None]


def trained(vectors: torch.Tensor, levels: int = 4, size: int = 16) -> ResidualQuantiser:
    quantiser = ResidualQuantiser(levels, size, vectors.shape[1])
    generator = torch.Generator().manual_seed(1)
    quantiser.start(vectors[..., :500], generator)
    for step in range(60):
        codes = quantiser.encode(vectors)
        quantiser.update(vectors, codes, 0.8, generator if step < 40 else None, step)
    return quantiser


def test_each_level_lowers_the_error() -> None:
    vectors = clustered()
    quantiser = trained(vectors)
    errors = [
        float((quantiser.decode(quantiser.encode(vectors, n)) - vectors).pow(2).mean()) for n in range(1, 5)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * float(vectors.var())


def test_fewer_levels_are_a_prefix() -> None:
    vectors = clustered(200)
    quantiser = trained(vectors)
    assert torch.equal(quantiser.encode(vectors, 2), quantiser.encode(vectors)[..., :2])


def test_training_pass_agrees_with_encode_and_decode_and_passes_the_gradient() -> None:
    vectors = clustered(100).requires_grad_()
    quantiser = trained(vectors.detach())
    result = quantiser(vectors, 3)
    assert torch.equal(result.codes, quantiser.encode(vectors.detach(), 3))
    assert torch.allclose(result.vectors, quantiser.decode(result.codes), atol=1e-5)
    result.vectors.sum().backward()
    assert torch.equal(vectors.grad, torch.ones_like(vectors))


def test_a_wider_search_leaves_less_error_and_does_not_depend_on_the_company() -> None:
    vectors = torch.randn(2, 6, 700, generator=torch.Generator().manual_seed(3)) * 2
    quantiser = trained(clustered())
    errors = []
    for width in (1, 2, 8):
        codes = quantiser.encode(vectors, width=width)
        assert codes.shape == (2, 700, 4)
        errors.append(float((quantiser.decode(codes) - vectors).pow(2).mean()))
    assert errors[0] > errors[1] > errors[2]
    assert torch.equal(quantiser.encode(vectors[:1], width=8), codes[:1])
    assert torch.equal(quantiser.encode(vectors, 1, width=8), quantiser.encode(vectors, 1))


def test_every_clip_may_have_levels_of_its_own() -> None:
    vectors = clustered(120)
    quantiser = trained(vectors)
    stacked = vectors.view(vectors.shape[1], 3, -1).transpose(0, 1).contiguous()
    result = quantiser(stacked, torch.tensor([1, 4, 2]))
    for clip, levels in enumerate((1, 4, 2)):
        alone = quantiser(stacked[clip : clip + 1], levels)
        assert torch.allclose(result.vectors[clip], alone.vectors[0], atol=1e-6)
        assert torch.allclose(
            result.first[clip], quantiser(stacked[clip : clip + 1], 1).vectors[0], atol=1e-6
        )


def test_unused_codes_restart_at_vectors_of_the_batch() -> None:
    vectors = clustered()
    quantiser = ResidualQuantiser(1, 16, vectors.shape[1])
    generator = torch.Generator().manual_seed(0)
    quantiser.start(vectors, generator)
    quantiser.codebooks[0, :8] = 1e3
    quantiser.sums[0, :8] = 1e3 * quantiser.counts[0, :8, None]
    restarted = 0
    for step in range(60):
        restarted += quantiser.update(vectors, quantiser.encode(vectors), 0.8, generator, step)
    assert restarted >= 8
    used = torch.bincount(quantiser.encode(vectors).flatten(), minlength=16)
    assert int((used == 0).sum()) == 0
