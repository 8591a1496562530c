"""What other libraries ask of a model, answered by an engine; each needs its extra."""
