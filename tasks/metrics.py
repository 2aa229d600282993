"""Metrics on a whole set of outputs at once, by scikit-learn. They import it when first called: it takes a second.

outputs are scores[N, C], or one logit per record ([N] or [N, 1]) for two classes; targets[N] are class labels.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of right classes. Raises ValueError when the targets do not have one label per prediction."""
    predicted, truth = _predicted(outputs), _labels(outputs, targets)
    if predicted.shape != truth.shape:
        raise ValueError(f"{list(predicted.shape)} predictions and {list(truth.shape)} targets")
    return float((predicted == truth).double().mean())


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Mean over the classes that occur of the share found."""
    from sklearn.metrics import recall_score

    truth = _array(_labels(outputs, targets))
    return float(recall_score(truth, _array(_predicted(outputs)), labels=np.unique(truth), average="macro"))


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve; for more than two classes the mean of one against the rest.

    Not a number where the curve is undefined: a class is missing from the targets (a client with one class only), or
    an output is not finite (the model diverged).
    """
    from sklearn.metrics import roc_auc_score

    truth = _array(_labels(outputs, targets))
    classes = 2 if _one_logit(outputs) else outputs.shape[1]
    if len(np.unique(truth)) < classes or not bool(torch.isfinite(outputs).all()):
        return float("nan")
    if _one_logit(outputs):
        return float(roc_auc_score(truth, _array(outputs.double().reshape(-1))))
    if classes == 2:
        return float(roc_auc_score(truth, _array(outputs[:, 1].double() - outputs[:, 0].double())))
    return float(roc_auc_score(truth, _array(torch.softmax(outputs.double(), 1)), multi_class="ovr"))


def _one_logit(outputs: Tensor) -> bool:
    return outputs.dim() == 1 or outputs.shape[1] == 1


def _predicted(outputs: Tensor) -> Tensor:
    return (outputs.reshape(-1) > 0).long() if _one_logit(outputs) else outputs.argmax(1)


def _labels(outputs: Tensor, targets: Tensor) -> Tensor:
    """Labels as the loss of one logit wants them (floats, a column) or as class labels are."""
    return targets.reshape(-1).long() if _one_logit(outputs) else targets


def _array(values: Tensor) -> NDArray[Any]:
    return values.detach().cpu().numpy()
