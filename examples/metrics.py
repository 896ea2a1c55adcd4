"""AUC, log loss and ROC curve of a binary classifier, in NumPy."""

import numpy as np


def auc(labels, scores):
    """Area under the ROC curve: the probability that a positive scores above a negative.

    Computed from the rank sum (Mann and Whitney 1947). Equal scores share their mean rank, so a tie
    counts one half.

    Args:
        labels: `[rows]`, 1 for a positive, 0 for a negative.
        scores: `[rows]`, any increasing function of the probability.

    Returns:
        A float in [0, 1]; NaN if one of the two classes is absent.
    """
    positive = np.asarray(labels) > 0.5
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if num_positive == 0 or num_negative == 0:
        return float("nan")
    _, inverse, counts = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = mean_rank[inverse][positive].sum()
    return float((rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def log_loss(labels, logits):
    """Mean binary cross-entropy in nats; labels and logits `[rows]`; stable for large logits."""
    labels, logits = np.asarray(labels, np.float64), np.asarray(logits, np.float64)
    return float(np.mean(np.logaddexp(0.0, logits) - labels * logits))


def roc_curve(labels, scores):
    """Points of the ROC curve, one per different score, from (0, 0) to (1, 1).

    Returns:
        (false positive rates, true positive rates), both `[points]` and increasing.
    """
    scores = np.asarray(scores)
    order = np.argsort(-scores, kind="stable")
    positive = (np.asarray(labels) > 0.5)[order]
    last_of_score = np.append(np.diff(scores[order]) != 0, True)
    true_positive = np.append(0, np.cumsum(positive)[last_of_score])
    false_positive = np.append(0, np.cumsum(~positive)[last_of_score])
    return false_positive / false_positive[-1], true_positive / true_positive[-1]
