"""Whether the processes of a run live, get on, and keep pace."""
