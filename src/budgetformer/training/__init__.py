"""Training: one model on `transformers.Trainer`, and the whole job from data to the table."""
