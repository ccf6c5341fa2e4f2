"""What a run costs, from shapes alone: parameters, FLOPs, memory."""
