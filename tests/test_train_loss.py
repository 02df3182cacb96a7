"""The loss of the training recipe: its gradient, what its acceptance means, the columns it samples."""

from __future__ import annotations

import pytest
import torch

from eagle_decode.train import Settings, train
from eagle_decode.train.loss import Columns, TeacherLoss, _found


@pytest.mark.parametrize(("weight", "candidates"), [(0.0, 1), (1.0, 1), (3.0, 2), (1.0, 4)])
@pytest.mark.parametrize("sharpness", [0.3, 3.0])  # of the guess: the rest has too much of it, or too little
def test_teacher_loss_and_its_gradient(weight, candidates, sharpness):
    """Against autograd through the formula; tokens 3 and 9 are drawn from the rest, 9 twice; from 15 on, a
    column stands for several tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = (sharpness * torch.randn(7, 20, generator=generator)).requires_grad_()
    log_counts = torch.zeros(20)
    log_counts[15:] = 1.3
    whole = torch.randn(7, 15, generator=generator).softmax(-1)
    whole[:, [3, 9]] = 1e-3
    whole = whole / whole.sum(-1, keepdim=True)
    probs, ids = whole.topk(6, -1)
    rest = 1 - probs.sum(-1, keepdim=True)
    drawn = torch.tensor([3, 9, 9]).expand(7, 3)
    teacher = torch.cat([ids, drawn], 1), torch.cat([probs, (rest / 3).expand(7, 3)], 1)
    weighted = logits + log_counts
    given = weighted.softmax(-1).gather(1, ids)

    def found(q, p):
        return p * (1 - (1 - q / p).clamp(min=0) ** candidates)

    acceptance = found(given, probs).sum(-1) + found(1 - given.sum(-1), rest[:, 0])
    log_probs = logits - weighted.logsumexp(-1, keepdim=True)
    entropy = -(torch.zeros(7, 20).scatter_add(1, *teacher) * log_probs).sum(-1)
    expected = (entropy - weight * acceptance.log()).mean()
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    loss, best = TeacherLoss.apply(logits, log_counts, *teacher, 6, weight, candidates)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(best, logits.argmax(-1))
    assert torch.allclose(
        logits.grad.float(), expected_gradient, rtol=2e-2, atol=1e-3
    )  # the gradient is kept in bf16


@pytest.mark.parametrize("candidates", [2, 4, 8])
def test_acceptance_is_about_that_of_coupled_drafts(candidates):
    """How often the winner under shared noise is among the first under the head's own scores."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(800, generator=generator)
    p, q = logits.softmax(-1), (logits + torch.randn(800, generator=generator)).softmax(-1)
    noise = -torch.empty(10_000, 800).exponential_(generator=generator).log()
    scores, token = q.log() + noise, (p.log() + noise).argmax(-1, keepdim=True)
    rank = (scores > scores.gather(1, token)).sum(-1)
    acceptance, _ = _found(q, p, candidates)
    assert acceptance.sum().item() == pytest.approx((rank < candidates).float().mean().item(), abs=0.03)


@pytest.mark.parametrize("name", ["candidates", "num_columns"])
def test_settings_below_one_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        train("tiny", tmp_path / "head", settings=Settings(**{name: 0}))


def test_columns_hold_what_is_needed_and_stand_for_all():
    generator = torch.Generator().manual_seed(0)
    needed = torch.tensor([[3, 250], [7, 3]])
    columns = Columns.choose(needed, 300, 40, generator)
    assert len(columns.ids) == 40
    assert torch.equal(columns.ids, columns.ids.unique())
    assert torch.equal(columns.ids[columns.find(needed)], needed)
    assert (columns.log_counts[columns.find(needed)] == 0).all()
    assert columns.log_counts.exp().sum().item() == pytest.approx(300)
    assert torch.equal(
        columns.find(torch.tensor([-1, 7])), torch.tensor([-1, int(columns.find(needed)[1, 0])])
    )
    other = Columns.choose(needed, 300, 40, generator)
    assert not torch.equal(columns.ids, other.ids)
    few = Columns.choose(needed, 300, 2, generator)  # what is needed, and one for all others
    assert len(few.ids) == 4
    assert few.log_counts.exp().sum().item() == pytest.approx(300)
    for size in (300, 1000):
        everything = Columns.choose(needed, 300, size, generator)
        assert torch.equal(everything.ids, torch.arange(300))
        assert not everything.log_counts.any()
    assert torch.equal(Columns.choose(torch.arange(5), 5, 2, generator).ids, torch.arange(5))


def test_sampled_columns_give_the_gradient_of_all():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 400, generator=generator)
    probs, ids = torch.randn(6, 400, generator=generator).softmax(-1).topk(20, -1)
    teacher_probs = torch.cat([probs, 1 - probs.sum(-1, keepdim=True)], 1)
    teacher_ids = torch.cat([ids, torch.full((6, 1), 9)], 1)

    def gradient(columns: Columns) -> torch.Tensor:
        chosen = logits[:, columns.ids].requires_grad_()
        teacher = columns.find(teacher_ids), teacher_probs
        loss, _ = TeacherLoss.apply(chosen, columns.log_counts, *teacher, 20, 1.0, 2)
        loss.backward()
        return torch.zeros(6, 400).index_add_(1, columns.ids, chosen.grad.float())

    expected = gradient(Columns.choose(teacher_ids, 400, 400, generator))
    draws = [gradient(Columns.choose(teacher_ids, 400, 200, generator)) for _ in range(1000)]
    # bf16, and the reciprocal of a mean that is only right on average: a part in a hundred.
    assert (torch.stack(draws).mean(0) - expected).norm() < 0.03 * expected.norm()
