"""Draws a training run's curves and its ROC curve into a PNG file."""

import os

import metrics


def draw(path, train_losses, test_points, labels, logits):
    """Writes the figure; creates the folder if needed.

    Args:
        path: file to write.
        train_losses: list of floats, one per step.
        test_points: list of (step, log loss, AUC), measured on test flights while training.
        labels: `[rows]`, of the whole test set.
        logits: `[rows]`, after training.
    """
    import matplotlib

    matplotlib.use("Agg")  # No display needed.
    from matplotlib import pyplot

    steps, losses, aucs = zip(*test_points, strict=True)
    figure, (loss_axis, auc_axis, roc_axis) = pyplot.subplots(1, 3, figsize=(15, 4.5))
    loss_axis.plot(range(1, len(train_losses) + 1), train_losses, alpha=0.4, label="training batch")
    loss_axis.plot(steps, losses, marker=".", label="test")
    loss_axis.set(title="Log loss", xlabel="step", ylabel="nats")
    loss_axis.legend()
    auc_axis.plot(steps, aucs, marker=".", color="tab:orange")
    auc_axis.set(title="Test AUC", xlabel="step")
    false_positive, true_positive = metrics.roc_curve(labels, logits)
    roc_axis.plot(false_positive, true_positive)
    roc_axis.plot([0, 1], [0, 1], color="grey", linestyle=":")
    area = metrics.auc(labels, logits)
    roc_axis.set(
        title=f"ROC of the test flights, area {area:.4f}",
        xlabel="on-time flights called late",
        ylabel="late flights called late",
    )
    figure.tight_layout()
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
