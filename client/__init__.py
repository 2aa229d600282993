"""What runs at a client: local training and evaluation."""

from coterie.client.algorithms import LOCAL_ALGORITHMS, OPTIMIZERS, SCHEDULES
from coterie.client.devices import choose_device
from coterie.client.training import LocalPlan, LocalTrainer, measure

__all__ = ["LOCAL_ALGORITHMS", "OPTIMIZERS", "SCHEDULES", "LocalPlan", "LocalTrainer", "choose_device", "measure"]
