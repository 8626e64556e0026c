"""BERT fine-tuned on GLUE's classification tasks, with gradient accumulation."""
