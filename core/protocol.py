"""What a node and its server must agree on."""

VERSION = 1
"""Of what they say to each other. A node of another version waits until one of the two is upgraded."""

HOLD_SECONDS = 25.0
"""A request is held open for at most so long: proxies cut idle connections after half a minute or more."""

HEARTBEAT_SECONDS = 60.0
"""Between a node's heartbeats to Flower, which misses two before the node is offline to it. Whether a node is here is
seen by the request that it holds open: seconds after a cut."""
