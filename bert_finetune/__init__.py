"""BERT fine-tuned on GLUE or your own data, with gradient accumulation."""
