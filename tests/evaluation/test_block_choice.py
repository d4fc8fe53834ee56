"""What rules of choosing blocks lose: by hand on made-up attention."""

from __future__ import annotations

import pytest
import torch

from kvseek.core.config import KEY_BLOCK
from kvseek.evaluation.block_choice import BEST, RULES, Loss, main, measure
from kvseek.evaluation.capture import CapturedLayer


@pytest.mark.parametrize("place", [100, 700, 1000])
def test_a_block_that_all_queries_look_at_is_found(place: int) -> None:
    """One key has nearly all of the attention: every rule finds its block, and loses the little that the others have."""
    torch.manual_seed(place)
    tokens, start = 1600, 1344
    keys, queries = torch.randn(2, tokens, 32) * 0.1, torch.randn(4, tokens, 32) * 0.1
    sought = torch.nn.functional.normalize(torch.randn(32), dim=0)
    first = place // KEY_BLOCK * KEY_BLOCK
    keys[:, first : first + KEY_BLOCK] += sought
    queries += 10 * sought
    found: dict[object, Loss] = {}
    measure(CapturedLayer(keys, queries, 1.0), start, 256, [512], found)
    assert {name for name, _ in found} == {BEST, *RULES}
    for (name, _), loss in found.items():
        assert loss.blocks == 1
        assert loss.sharp == loss.sharp_chosen == 4 * 256, name
        assert 0 < loss.lost < 0.01


def test_what_is_lost_is_the_share_of_the_blocks_that_are_left_out() -> None:
    """Equal keys: every block has the same attention, and queries see their own keys too."""
    found: dict[object, Loss] = {}
    measure(CapturedLayer(torch.zeros(1, 1536, 8), torch.zeros(2, 1536, 8), 1.0), 1024, 512, [512], found)
    expected = sum(512 / (1025 + i) for i in range(512)) / 512
    for loss in found.values():
        assert loss.lost == pytest.approx(expected, rel=1e-4)
        assert loss.sharp == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--budgets", "1024,x"), "--budgets = '1024,x': must be a comma list of numbers >= 320"),
        (("--starts", ""), "--starts = '': must be a comma list of numbers >= 1"),
        (("--starts", "900"), "--starts = 900: must be > 2048, the largest budget, and <= 7680"),
    ],
)
def test_bad_flags_are_refused_by_name(
    flags: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "model", "--text", "text", *flags]) == 1
    assert message in capsys.readouterr().err
