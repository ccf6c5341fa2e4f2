"""Files and folders on a disk or an object store: one path type, leases, shared folders."""
