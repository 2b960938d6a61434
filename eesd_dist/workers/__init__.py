"""The Ray actors of a pipeline's ranks. Only this package imports Ray."""
