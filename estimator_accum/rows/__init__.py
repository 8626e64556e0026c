"""The analysis of which rows of a tensor belong to which example."""
