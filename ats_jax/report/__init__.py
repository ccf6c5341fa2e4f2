"""What happened in runs, from the files in their folders: read, judged and shown as one page."""
