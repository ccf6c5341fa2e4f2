"""Processes of a job: started, met, watched, checked before a run, submitted to a scheduler."""
