"""Which documents are worth training on: `sift` judges them, the other files say how."""
