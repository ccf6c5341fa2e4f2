"""Files to documents: formats, inputs on a store, the held-out part, what was malformed."""
