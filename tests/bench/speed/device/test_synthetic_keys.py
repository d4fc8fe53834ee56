"""Synthetic keys and queries: they have the statistics of real ones, on which selections depend."""

from __future__ import annotations

import pytest
import torch

from kvseek.bench.speed.device.filling import Spectrum, SyntheticKeys

CPU = torch.device("cpu")


class TestSynthetic:
    tokens = 8192

    @pytest.fixture
    def source(self) -> SyntheticKeys:
        return SyntheticKeys(2, 128, CPU, seed=1)

    @pytest.fixture
    def keys(self, source: SyntheticKeys) -> torch.Tensor:
        return source.keys(self.tokens)

    def test_spectrum(self, keys: torch.Tensor) -> None:
        """Eigenvalues of the covariance fall as 1/rank or, where a frequent topic lies, faster, in no channel's direction;
        a few channels hold most of the mean."""
        for head in keys:
            eigenvalues = torch.linalg.eigvalsh(head.T.cov()).flip(0)
            assert 7 < (eigenvalues[7] / eigenvalues[63]).item() < 16
            assert head.var(dim=0).max() < 0.25 * eigenvalues[0]
            mean = head.mean(dim=0).square().sort(descending=True).values
            assert mean[:4].sum() > 0.5 * mean.sum()
            assert mean.sum() > 0.5 * head.var(dim=0).sum()

    def test_topics_persist_and_differ_in_frequency(self, source: SyntheticKeys) -> None:
        topics = source.topic_runs(50_000)
        changes = (topics[1:] != topics[:-1]).float().mean().item()
        assert 1 / changes == pytest.approx(Spectrum().run_tokens, rel=0.15)
        counts = torch.bincount(topics, minlength=1024).sort(descending=True).values
        assert counts[0] > 20 * counts[100]

    def test_attention_is_concentrated(self, source: SyntheticKeys, keys: torch.Tensor) -> None:
        """The best 100 of 8,192 keys hold about two thirds of the mass, as on real keys; so of another layer's keys."""
        queries = source.queries(8, 64)
        for signs in (torch.ones(2, 1, 128), source.signs()):
            turned = (queries * signs.repeat_interleave(4, dim=0)).view(2, 256, 128)
            weights = (turned @ (keys * signs).transpose(1, 2) / 128**0.5).softmax(dim=-1)
            assert weights.topk(100).values.sum(dim=-1).mean().item() == pytest.approx(0.65, abs=0.1)

    def test_neighbouring_queries_seek_the_same(self, source: SyntheticKeys, keys: torch.Tensor) -> None:
        queries = source.queries(2, 200)
        best = (queries @ keys.transpose(1, 2)).topk(100).indices

        def shared(steps: int) -> float:
            """Share of the best rows that were among the best so many queries before."""
            return (best[:, steps:, :, None] == best[:, :-steps, None, :]).any(dim=-1).float().mean().item()

        assert shared(1) > 2 * shared(60)

    def test_reproducible_and_of_the_dtype_asked_for(self) -> None:
        first, second = (SyntheticKeys(2, 16, CPU, seed=3) for _ in range(2))
        assert torch.equal(first.keys(50, torch.bfloat16), second.keys(50, torch.bfloat16))
        assert torch.equal(first.queries(4, 5), second.queries(4, 5))
        assert not torch.equal(first.keys(50), first.keys(50))
        assert first.values(7, torch.float16).shape == (2, 7, 16)
