"""What runs at a client: training and evaluation in worker processes, and the node's daemon."""
