"""Metrics on a whole set of outputs at once, by scikit-learn. They import it when first called: it takes a second."""

import numpy as np
import torch
from torch import Tensor


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of right classes. outputs[N, C] scores, targets[N] class labels."""
    return float((outputs.argmax(1) == targets).float().mean())


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Mean over the classes that occur of the share found. outputs[N, C], targets[N]."""
    from sklearn.metrics import recall_score

    truth = targets.numpy()
    return float(recall_score(truth, outputs.argmax(1).numpy(), labels=np.unique(truth), average="macro"))


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve; for more than two classes the mean of one against the rest. outputs[N, C], targets[N].

    Not a number when a class is missing from the targets: the curve is then undefined.
    """
    from sklearn.metrics import roc_auc_score

    truth = targets.numpy()
    if len(np.unique(truth)) < outputs.shape[1]:
        return float("nan")
    scores = torch.softmax(outputs.double(), 1).numpy()
    if outputs.shape[1] == 2:
        return float(roc_auc_score(truth, (outputs[:, 1] - outputs[:, 0]).numpy()))
    return float(roc_auc_score(truth, scores, multi_class="ovr"))
