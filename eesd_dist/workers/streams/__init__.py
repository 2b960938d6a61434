"""The token streams of a pipeline: admitted, made, kept, and read by ingresses."""
