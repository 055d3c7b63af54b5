"""Scores from noisy counts of records by label and bin of predicted probability."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_FEWEST = 2.0  # standard deviations of a total's noise that it must exceed, or a score is undefined
_FURTHEST = 4.0  # logits of the outermost edges: probabilities 0.02 and 0.98


class Reading(NamedTuple):
    """A score (None: undefined, because its records are fewer than the noise) and the standard deviation of its noise.

    The deviation leaves out how few the records are, and what bins hide.
    """

    value: float | None
    noise: float | None


def edges_of(bins: int) -> tuple[float, ...]:
    """Return the edges `[bins - 1]` between bins that are equally wide in logits; of an even number, one is 0.5.

    >>> [round(edge, 3) for edge in edges_of(4)]
    [0.018, 0.5, 0.982]
    """
    return tuple(torch.linspace(-_FURTHEST, _FURTHEST, bins - 1, dtype=torch.float64).sigmoid().tolist())


def binned_scores(counts: Tensor, noise_std: float, edges: tuple[float, ...], of_two: bool) -> dict[str, Reading]:
    """Return accuracy, calibration error and, of two classes, AUROC from counts `[2, bins]` with Gaussian noise.

    `of_two` says that the rows are labels 0 and 1 with the probability of class 1, else they are wrong and right
    predictions with the probability of the predicted class. AUROC counts pairs in one bin as half. The calibration
    error is the mean over records of |stated - observed share| of their bin, where the probability of the bin's middle
    is stated, and the square of the noise is subtracted from that of each difference. Post-processing.
    """
    middles = _middles(edges).to(counts)
    total, total_std = counts.sum(), noise_std * math.sqrt(counts.numel())
    undefined = Reading(None, None)
    if not total > _FEWEST * total_std:
        return dict.fromkeys(("accuracy", *(("auroc",) if of_two else ()), "calibration_error"), undefined)
    right = torch.stack([middles < 0.5, middles >= 0.5]) if of_two else torch.tensor([[False], [True]])
    share = float((counts * right).sum() / total)
    weights = right.expand_as(counts).double() - share
    scores = {"accuracy": _within(share, noise_std * float(weights.norm() / total))}
    if of_two:
        scores["auroc"] = _auroc(counts, noise_std) or undefined
    gaps = (1 - middles) * counts[1] - middles * counts[0]
    spread = noise_std * (middles.square() + (1 - middles).square()).sqrt()
    error = float((gaps.square() - spread.square()).clamp(min=0).sqrt().sum() / total)
    scores["calibration_error"] = _within(error, float(spread.norm() / total))
    return scores


def _auroc(counts: Tensor, noise_std: float) -> Reading | None:
    below, above = counts
    without, having = below.sum(), above.sum()
    if not torch.minimum(without, having) > _FEWEST * noise_std * math.sqrt(len(below)):
        return None
    lower = (below.cumsum(0) - below / 2) / without  # share of class 0 below each bin
    higher = ((above.flip(0).cumsum(0).flip(0)) - above / 2) / having
    value = (above * lower).sum() / having
    noise = torch.cat([(lower - value) / having, (higher - value) / without]).norm() * noise_std
    return _within(float(value), float(noise))


def _within(value: float, noise: float) -> Reading:
    return Reading(min(max(value, 0.0), 1.0), noise)


def _middles(edges: tuple[float, ...]) -> Tensor:
    """Return the probability that stands for each bin: that of its mean logit."""
    logits = torch.tensor(edges, dtype=torch.float64).logit()
    step = 2 * _FURTHEST / max(1, len(edges) - 1)
    ends = torch.cat([logits[:1] - step, logits, logits[-1:] + step])
    return ((ends[1:] + ends[:-1]) / 2).sigmoid()
