"""The library's public interface: generation in the caller's process, in the names of vLLM."""
