"""One update: state, loss, optimizer, the jitted step."""
