"""Would it help? Paired trials from one state."""
