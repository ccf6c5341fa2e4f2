"""The command line: a file for each verb, with its flags, its errors and its exit codes."""
