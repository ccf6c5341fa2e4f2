"""Several processes that train together: on this machine, or by a cluster's own scheduler."""
